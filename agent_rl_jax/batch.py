"""Device pytrees that cross between rollout, algorithms and training.

Left aligned, index equals position; `logprobs[b, t]` belongs to
`tokens[b, t]`.  No behaviour lives here but the arithmetic of `Mean` and
`Extreme`.
"""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def _library(*numbers: Array) -> Any:
  """numpy for numbers that were fetched, so that nothing is compiled."""
  host = all(isinstance(x, (np.ndarray, np.generic)) for x in numbers)
  return np if host else jnp


@flax.struct.dataclass
class Mean:
  """A mean that is still a sum: divided once, on the host, at the end."""

  total: Array
  count: Array

  def __add__(self, other: Mean) -> Mean:
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> Array:
    """total / count, and 0 where nothing was counted."""
    where = _library(self.total, self.count).where
    none = self.count == 0
    return where(none, 0.0, self.total / where(none, 1, self.count))


@flax.struct.dataclass
class Extreme:
  """The largest of some numbers, or with sign -1 the smallest.

  `+` takes what is more extreme, so that it is made over micro-batches and
  updates as sums are.

  Attributes:
    largest: float [], of sign * x; -inf while there is no x.
    sign: 1 or -1.
  """

  largest: Array
  sign: int = flax.struct.field(pytree_node=False, default=1)

  def __add__(self, other: Extreme) -> Extreme:
    maximum = _library(self.largest, other.largest).maximum
    return self.replace(largest=maximum(self.largest, other.largest))

  def value(self) -> Array:
    """The extreme, and 0 of nothing."""
    lib = _library(self.largest)
    return lib.where(lib.isneginf(self.largest), 0.0, self.sign * self.largest)


@flax.struct.dataclass
class TrajectoryBatch:
  """A rollout batch, one row per context.

  B rows, T positions, C reward components, U turns.  Rows of one episode
  repeat its per-episode fields; `episode` tells them apart.

  Attributes:
    tokens: int32 [B, T].
    action_mask: bool [B, T], True exactly on sampled tokens.
    length: int32 [B], tokens in the row, 0 for a padding row.
    sampler_logprobs: float32 [B, T], 0 off the mask.
    policy_version: int32 [B, T], version that sampled each token.
    turn: int32 [B, T], turn index of each token within its episode; a
      turn's observation carries the turn's own index; prompt is 0.
    episode: int32 [B], dense index of the episode in the batch.
    group: int32 [B], dense index of the group in the batch.
    valid: bool [B], enters statistics.
    weight: float32 [B], enters the loss; 0 = padding or masked.
    components: float32 [B, C], named reward components of the episode.
    returns: float32 [B], the scalar reward that is optimized.
    metric: float32 [B], the unshaped measure (accuracy).
    baseline: float32 [B] or None (ReMax's greedy return).
    turn_rewards: float32 [B, U], the part of `returns` that the environment
      gave at each turn of the episode: its reward times the weight of the
      reward component `environment`, 0 without that component.
    anchor: int32 [B, U], dense id of the anchor state of each turn of the
      episode, -1 if none; equal ids of two groups mean nothing.
    turn_mask: bool [B, U], which turns the episode has.
    fresh: bool [B] or None for all: no earlier batch held the episode, so that
      statistics over several batches count it once.
  """

  tokens: Array
  action_mask: Array
  length: Array
  sampler_logprobs: Array
  policy_version: Array
  turn: Array
  episode: Array
  group: Array
  valid: Array
  weight: Array
  components: Array
  returns: Array
  metric: Array
  turn_rewards: Array
  anchor: Array
  turn_mask: Array
  baseline: Array | None = None
  fresh: Array | None = None


@flax.struct.dataclass
class Scores:
  """Teacher-forced quantities of a TrajectoryBatch, float32 [B, T] each."""

  old_logprobs: Array
  reference_logprobs: Array | None = None
  values: Array | None = None


@flax.struct.dataclass
class Advantages:
  """advantages, value_targets: float32 [B, T]; state: running baselines.

  value_mask: bool [B, T], tokens whose value is trained; None for all sampled.
  """

  advantages: Array
  value_targets: Array | None = None
  state: dict | None = None
  value_mask: Array | None = None


@flax.struct.dataclass
class LossBatch:
  """What a loss reads, per token, so packed and unpacked rows are alike.

  All [B, T] (or [M, B, T] for M micro-batches).  `segment` is 0 on padding
  and 1, 2, ... for the rows packed side by side; `positions` restart in each
  segment.  `mask` is True where the token was sampled; the log-prob of
  `tokens[t]` is predicted from `t - 1` of the same segment.

  Attributes:
    tokens, positions, segment: int32.
    mask: bool.
    advantages, old_logprobs, sampler_logprobs: float32.
    weight: float32, the token's weight in the loss (`aggregate.token_weights`;
      the row's weight on each sampled token for token-mean).
    row: int32, dense id of the token's trajectory row, for losses and
      aggregation modes that reduce over rows; padding has the last id.
    group: int32, dense id of the token's group (prompt-mean).
    reference_logprobs, value_targets: float32 or None.
    old_values: float32 or None.
    denominator: float32, the token's part of what the loss is divided by
      (`aggregate.token_weights`); None stands for `weight`.
    correction: float32, detached weight for a sampler that differs from the
      trainer (`corrections`), or None.
    value_weight, value_denominator: float32, those of the value loss where
      not every token's value is trained; None stands for the policy loss's.
    own: bool, sampled by the policy that the rollout batch's first update
      starts from, or None for all of mask.
  """

  tokens: Array
  positions: Array
  segment: Array
  mask: Array
  advantages: Array
  old_logprobs: Array
  sampler_logprobs: Array
  weight: Array
  row: Array
  group: Array
  reference_logprobs: Array | None = None
  value_targets: Array | None = None
  old_values: Array | None = None
  denominator: Array | None = None
  correction: Array | None = None
  value_weight: Array | None = None
  value_denominator: Array | None = None
  own: Array | None = None
