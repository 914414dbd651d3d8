"""Episodes to arrays: host numpy in, one TrajectoryBatch of numpy out.

Row order is episode order; padding rows stand at the end.  Invariant: an
episode that failed for reasons of infrastructure has valid = weight = 0 and
still holds its place in its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl_jax.batch import TrajectoryBatch
from agent_rl_jax.types import Episode


def bucket(length: int, buckets: Sequence[int]) -> int:
  """Smallest bucket that holds `length`; ValueError when none does."""
  for size in sorted(buckets):
    if size >= length:
      return size
  raise ValueError(
      f'a row of {length} tokens exceeds the largest length bucket'
      f' {max(buckets)}'
  )


def collate(
    episodes: Sequence[Episode],
    *,
    components: Sequence[str],
    returns: Sequence[float],
    metric: Sequence[float],
    valid: Sequence[bool],
    num_rows: int,
    length: int,
    num_turns: int,
    turn_weight: float,
    anchors: Sequence[int],
    weight: Sequence[float] | None = None,
    baseline: Sequence[float] | None = None,
    fresh: Sequence[bool] | None = None,
) -> TrajectoryBatch:
  """Stacks episodes into a batch.

  Args:
    episodes: Scored episodes.
    components: Names of the reward components, the order of axis C.
    returns: Scalar return of each episode.
    metric: Unshaped measure of each episode.
    valid: Whether the episode was judged (False: infrastructure failure).
    num_rows: B, at least the number of rows of all episodes.
    length: T, at least the longest row.
    num_turns: U, at least the most turns.
    turn_weight: Weight in the return of what the environment gave to a turn
      (`Turn.reward`); 0 where the return holds none of it.
    anchors: Dense id of the anchor state of each turn of all episodes, in
      order; -1 where it has none.
    weight: Weight of each episode in the loss; None for 1 where it is valid.
    baseline: Return that each episode is compared with, or None.
    fresh: Whether no earlier batch held each episode; None where none did.

  Raises:
    ValueError: when something does not fit the given shape, or anchors are not
      one for each turn.
  """
  total = sum(len(e.rows) for e in episodes)
  longest = max((len(r.tokens) for e in episodes for r in e.rows), default=0)
  most = max((len(e.turns) for e in episodes), default=0)
  if total > num_rows or longest > length or most > num_turns:
    raise ValueError(
        f'{total} rows of up to {longest} tokens and {most} turns do not fit'
        f' a batch of {num_rows} rows, {length} tokens, {num_turns} turns'
    )
  turns = sum(len(e.turns) for e in episodes)
  if len(anchors) != turns:
    raise ValueError(f'{len(anchors)} anchors for {turns} turns')
  b, t, u = num_rows, length, num_turns
  out = TrajectoryBatch(
      tokens=np.zeros((b, t), np.int32),
      action_mask=np.zeros((b, t), bool),
      length=np.zeros(b, np.int32),
      sampler_logprobs=np.zeros((b, t), np.float32),
      policy_version=np.zeros((b, t), np.int32),
      turn=np.zeros((b, t), np.int32),
      episode=np.full(b, max(len(episodes), b) - 1, np.int32),
      group=np.full(b, b - 1, np.int32),
      valid=np.zeros(b, bool),
      weight=np.zeros(b, np.float32),
      components=np.zeros((b, len(components)), np.float32),
      returns=np.zeros(b, np.float32),
      metric=np.zeros(b, np.float32),
      turn_rewards=np.zeros((b, u), np.float32),
      anchor=np.full((b, u), -1, np.int32),
      turn_mask=np.zeros((b, u), bool),
      baseline=None if baseline is None else np.zeros(b, np.float32),
      fresh=None if fresh is None else np.zeros(b, bool),
  )
  groups: dict[int, int] = {}
  i = first_turn = 0
  for e, episode in enumerate(episodes):
    group = groups.setdefault(episode.group, len(groups))
    for r, row in enumerate(episode.rows):
      n = len(row.tokens)
      out.tokens[i, :n] = row.tokens
      out.action_mask[i, :n] = row.action_mask
      out.length[i] = n
      out.sampler_logprobs[i, :n] = row.logprobs
      out.policy_version[i, :n] = episode.policy_version
      out.episode[i] = e
      out.group[i] = group
      out.valid[i] = valid[e]
      out.weight[i] = float(valid[e]) * (1.0 if weight is None else weight[e])
      out.components[i] = [episode.rewards.get(c, 0.0) for c in components]
      out.returns[i] = returns[e]
      out.metric[i] = metric[e]
      if baseline is not None:
        out.baseline[i] = baseline[e]
      if fresh is not None:
        out.fresh[i] = fresh[e]
      # Of the whole episode, on each of its rows.
      n = len(episode.turns)
      out.turn_mask[i, :n] = True
      out.anchor[i, :n] = anchors[first_turn : first_turn + n]
      for k, turn in enumerate(episode.turns):
        out.turn_rewards[i, k] = turn_weight * turn.reward
        if turn.row == r:
          out.turn[i, turn.action_start : turn.observation_stop] = k
      i += 1
    first_turn += len(episode.turns)
  return out
