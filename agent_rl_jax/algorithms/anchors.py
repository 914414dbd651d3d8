"""Anchor states to dense ids, on the host.

GiGPO compares steps that start from the same state.  Leaves out what a state
is: the environment names it (`Observation.state_key`).  Invariant: states of
different groups never share an id, and ids go by first appearance.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence

import numpy as np

from agent_rl_jax.batch import TrajectoryBatch


def group_anchors(
    states: Sequence[Hashable | None],
    groups: Sequence[int],
    similarity: float = 0.0,
) -> np.ndarray:
  """int32 [N] id of each step's state, -1 where it has none.

  Args:
    states: One key per step, None for a step without a state; text (str, or
      bytes of UTF-8) with `similarity`.
    groups: The group of each step.
    similarity: 0 for equal keys.  Otherwise a step joins the group's first
      cluster whose first member is at least this similar in the ratio of
      Ratcliff and Obershelp, in (0, 1]; the result then depends on order and
      costs a comparison with every cluster.

  Raises:
    ValueError: similarity lies outside [0, 1].
  """
  if not 0 <= similarity <= 1:
    raise ValueError(f'similarity={similarity} must lie in [0, 1]')
  ids = np.full(len(states), -1, np.int32)
  exact: dict[tuple[int, Hashable], int] = {}
  clusters: dict[int, list[tuple[difflib.SequenceMatcher, int]]] = {}
  count = 0
  for step, (state, group) in enumerate(zip(states, groups, strict=True)):
    if state is None:
      continue
    key = (int(group), state)
    if key not in exact and similarity:
      text = state
      if isinstance(state, bytes):
        # What is no text stands for itself, byte by byte.
        text = state.decode('utf-8', 'surrogateescape')
      for matcher, cluster in clusters.setdefault(int(group), []):
        matcher.set_seq1(text)
        # The quick ones are bounds from above.
        if (
            matcher.real_quick_ratio() >= similarity
            and matcher.quick_ratio() >= similarity
            and matcher.ratio() >= similarity
        ):
          exact[key] = cluster
          break
      else:
        # A matcher remembers what it learns of its second text.
        matcher = difflib.SequenceMatcher(None, '', text)
        clusters[int(group)].append((matcher, count))
    if key not in exact:
      exact[key] = count
      count += 1
    ids[step] = exact[key]
  return ids


def anchored_fraction(batch: TrajectoryBatch) -> float:
  """Share of the steps whose anchor another step of their group has too.

  Of the valid episodes of a host batch; the other step may be one of the same
  episode.  0 also without any step.  Where it is 0, GiGPO's step advantages
  are all 0.
  """
  valid_B = np.flatnonzero(batch.valid)
  _, first_E = np.unique(batch.episode[valid_B], return_index=True)
  rows_E = valid_B[first_E]
  exists_ExU = batch.turn_mask[rows_E]
  anchor_ExU = batch.anchor[rows_E].astype(np.int64)
  own_ExU = batch.group[rows_E, None] * (1 + anchor_ExU.max(initial=0))
  _, members = np.unique(
      (own_ExU + anchor_ExU)[exists_ExU & (anchor_ExU >= 0)],
      return_counts=True,
  )
  return float(members[members > 1].sum() / max(exists_ExU.sum(), 1))
