"""Statistics over the episodes of a group, given back to every row.

Leaves out what an estimator does with them.  Invariant: an episode counts
once however many rows its context mode made of it, rows with valid = False
count nowhere, and rows of a group may lie anywhere in the batch.  Segment
counts are static: with dense ids there are never more groups or episodes than
rows.
"""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked

Array = jax.Array


@flax.struct.dataclass
class GroupStatistics:
  """Per row [B], of the row's group: episodes, mean, unbiased std, spread."""

  count: Array
  mean: Array
  std: Array
  spread: Array


def representatives(episode_B: Array, valid_B: Array) -> Array:
  """bool [B]: the first valid row of each episode."""
  rows = episode_B.shape[0]
  index_B = jnp.arange(rows, dtype=jnp.int32)
  first_E = jax.ops.segment_min(
      jnp.where(valid_B, index_B, rows), episode_B, num_segments=rows
  )
  return valid_B & (first_E[episode_B] == index_B)


def group_statistics(
    values_B: Array, group_B: Array, counted_B: Array
) -> GroupStatistics:
  """Two-pass statistics of values over the counted rows of each group.

  Args:
    values_B: One value per row.
    group_B: int32 dense ids in [0, B).
    counted_B: bool, which rows are samples (see `representatives`).

  Returns:
    Statistics in float32 (float64 for float64), gathered back to all rows.
  """
  rows = values_B.shape[0]
  values_B = masked.real(values_B)

  def total(x_B):
    x_B = jnp.where(counted_B, x_B, 0)
    return jax.ops.segment_sum(x_B, group_B, num_segments=rows)[group_B]

  count_B = total(jnp.ones_like(values_B))
  mean_B = total(values_B) / jnp.maximum(count_B, 1)
  # Selected before squaring: an uncounted row may hold anything.
  centered_B = jnp.where(counted_B, values_B - mean_B, 0)
  variance_B = total(centered_B**2) / jnp.maximum(count_B - 1, 1)
  high_B = jax.ops.segment_max(
      jnp.where(counted_B, values_B, -jnp.inf), group_B, num_segments=rows
  )[group_B]
  low_B = jax.ops.segment_min(
      jnp.where(counted_B, values_B, jnp.inf), group_B, num_segments=rows
  )[group_B]
  return GroupStatistics(
      count=count_B,
      mean=mean_B,
      std=jnp.sqrt(variance_B),
      spread=jnp.where(count_B > 0, high_B - low_B, 0),
  )


def normalized(
    values_B: Array,
    group_B: Array,
    counted_B: Array,
    normalize_std: bool,
    epsilon: float,
) -> Array:
  """values minus their group's mean, over std + epsilon if asked: [B].

  Exactly 0 for a group of one and for a group whose values are equal up to
  1e-6.
  """
  stats = group_statistics(values_B, group_B, counted_B)
  centered_B = masked.real(values_B) - stats.mean
  if normalize_std:
    centered_B = centered_B / (stats.std + epsilon)
  signal_B = (stats.count > 1) & (stats.spread > masked.SPREAD_TOLERANCE)
  return jnp.where(signal_B, centered_B, 0)


def broadcast(values_B: Array, mask_BxT: Array, valid_B: Array) -> Array:
  """values on the masked tokens of valid rows, 0 elsewhere: [B, T]."""
  return jnp.where(mask_BxT & valid_B[:, None], values_B[:, None], 0)
