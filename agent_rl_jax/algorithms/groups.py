"""Statistics over the episodes of a group, given back to every row.

Leaves out what an estimator does with them.  Invariant: a sample counts as
often as its weight says (episodes once, however many rows their context mode
made of them: see `representatives`), rows with valid = False count nowhere,
and rows of a group may lie anywhere in the batch.  Segment counts are static:
with dense ids there are never more groups or episodes than rows.
"""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked

Array = jax.Array


@flax.struct.dataclass
class GroupStatistics:
  """Per sample [N], of its group: samples, mean, unbiased std, spread."""

  count: Array
  mean: Array
  std: Array
  spread: Array


@jax.jit
def representatives(episode_B: Array, valid_B: Array) -> Array:
  """bool [B]: the first valid row of each episode."""
  rows = episode_B.shape[0]
  index_B = jnp.arange(rows, dtype=jnp.int32)
  first_E = jax.ops.segment_min(
      jnp.where(valid_B, index_B, rows), episode_B, num_segments=rows
  )
  return valid_B & (first_E[episode_B] == index_B)


def group_sum(values_N: Array, group_N: Array, weight_N: Array) -> Array:
  """Weighted sum of each sample's group, where weight is not 0: [N]."""
  values_N = jnp.where(weight_N != 0, values_N * weight_N, 0)
  total_G = jax.ops.segment_sum(
      values_N, group_N, num_segments=group_N.shape[0]
  )
  return total_G[group_N]


@jax.jit
def group_statistics(
    values_N: Array, group_N: Array, weight_N: Array
) -> GroupStatistics:
  """Two-pass statistics of values over each group.

  Args:
    values_N: One value per sample.
    group_N: int32 ids in [0, N).
    weight_N: How many samples each stands for; bool counts as 0 and 1.

  Returns:
    Statistics in float32 (float64 for float64), gathered back to all samples.
  """
  size = group_N.shape[0]
  values_N = masked.real(values_N)
  weight_N = weight_N.astype(values_N.dtype)
  counted_N = weight_N != 0
  # Selected first: a sample that does not count may hold anything.
  values_N = jnp.where(counted_N, values_N, 0)
  count_N = group_sum(jnp.ones_like(values_N), group_N, weight_N)
  mean_N = group_sum(values_N, group_N, weight_N) / jnp.maximum(count_N, 1)
  variance_N = group_sum((values_N - mean_N) ** 2, group_N, weight_N)
  high_G = jax.ops.segment_max(
      jnp.where(counted_N, values_N, -jnp.inf), group_N, num_segments=size
  )
  low_G = jax.ops.segment_min(
      jnp.where(counted_N, values_N, jnp.inf), group_N, num_segments=size
  )
  return GroupStatistics(
      count=count_N,
      mean=mean_N,
      std=jnp.sqrt(variance_N / jnp.maximum(count_N - 1, 1)),
      spread=jnp.where(count_N > 0, high_G[group_N] - low_G[group_N], 0),
  )


def normalized(
    values_N: Array,
    group_N: Array,
    weight_N: Array,
    normalize_std: bool,
    epsilon: float,
) -> Array:
  """values minus their group's mean, over std + epsilon if asked: [N].

  Exactly 0 for a group of one and for a group whose values are equal up to
  1e-6.
  """
  stats = group_statistics(values_N, group_N, weight_N)
  centered_N = masked.real(values_N) - stats.mean
  if normalize_std:
    centered_N = centered_N / (stats.std + epsilon)
  signal_N = (stats.count > 1) & (stats.spread > masked.SPREAD_TOLERANCE)
  return jnp.where(signal_N, centered_N, 0)


def broadcast(values_B: Array, mask_BxT: Array) -> Array:
  """values on the masked tokens of their rows, 0 elsewhere: [B, T]."""
  return jnp.where(mask_BxT, values_B[:, None], 0)
