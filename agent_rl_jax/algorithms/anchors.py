"""Anchor states to dense ids, on the host.

GiGPO compares steps that start from the same state.  Leaves out what a state
is: the environment names it (`Observation.state_key`).  Invariant: states of
different groups never share an id, and ids go by first appearance.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence

import numpy as np


def group_anchors(
    states: Sequence[Hashable | None],
    groups: Sequence[int],
    similarity: float | None = None,
) -> np.ndarray:
  """int32 [N] id of each step's state, -1 where it has none.

  Args:
    states: One key per step; text (str, or bytes of UTF-8) with `similarity`.
    groups: The group of each step.
    similarity: None for equal keys.  Otherwise a step joins the group's first
      cluster whose first member is at least this similar in the ratio of
      Ratcliff and Obershelp, in [0, 1]; the result then depends on order and
      costs a comparison with every cluster.

  Raises:
    ValueError: similarity lies outside [0, 1].
  """
  if similarity is not None and not 0 <= similarity <= 1:
    raise ValueError(f'similarity={similarity} must lie in [0, 1]')
  ids = np.full(len(states), -1, np.int32)
  exact: dict[tuple[int, Hashable], int] = {}
  clusters: dict[int, list[tuple[str, int]]] = {}
  count = 0
  for step, (state, group) in enumerate(zip(states, groups, strict=True)):
    if state is None:
      continue
    key = (int(group), state)
    if key not in exact and similarity is not None:
      text = state.decode() if isinstance(state, bytes) else state
      for first, cluster in clusters.setdefault(int(group), []):
        matcher = difflib.SequenceMatcher(None, text, first)
        if matcher.ratio() >= similarity:
          exact[key] = cluster
          break
      else:
        clusters[int(group)].append((text, count))
    if key not in exact:
      exact[key] = count
      count += 1
    ids[step] = exact[key]
  return ids
