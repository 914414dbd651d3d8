"""The critic's loss.

Leaves out the critic itself (`models/value.py`) and its targets (`gae`,
`turns`).  Invariant: tokens whose value is not trained have no part in the
loss, neither in its sum nor in what that is divided by.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked, returns
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import (
    Advantages,
    LossBatch,
    Mean,
    Scores,
    TrajectoryBatch,
)

Array = jax.Array


def _weights(batch: LossBatch) -> tuple[Array, Array]:
  """Weight and denominator of each token in the value loss."""
  weight_BxT, denominator_BxT = batch.weight, batch.denominator
  if batch.value_weight is not None:
    weight_BxT, denominator_BxT = batch.value_weight, batch.value_denominator
  if denominator_BxT is None:
    denominator_BxT = weight_BxT
  return weight_BxT, denominator_BxT


def _trained(batch: LossBatch) -> Array:
  """bool: tokens whose value is trained."""
  return batch.mask & (_weights(batch)[0] != 0)


def loss_count(batch: LossBatch) -> Array:
  """What the value loss is divided by: its tokens' denominators, summed."""
  return masked.masked_sum(_weights(batch)[1], _trained(batch))


def value_loss(
    values_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, dict[str, Mean]]:
  """max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2, aggregated.

  The clipped value loss of PPO's reference code; targets are constants.  The
  aggregation is the policy loss's, over the tokens whose value is trained: a
  row's mean, say, is that of its turn starts where only they have a value.

  Args:
    values_BxT: New values, in units of the return.
    batch: With `value_targets`, and `old_values` if values are clipped.
    options: Static.

  Raises:
    ValueError: `value_targets` or `old_values` is missing.
  """
  if batch.value_targets is None:
    raise ValueError(
        'the value loss needs LossBatch.value_targets: choose an estimator '
        'that gives them (gae, bi_level_gae, turn_gae)'
    )
  if options.value_clip and batch.old_values is None:
    raise ValueError(
        f'value_clip={options.value_clip} needs LossBatch.old_values: score '
        'the batch with the critic, or set value_clip=0'
    )
  trained_BxT = _trained(batch)

  def chosen(x_BxT):
    return jnp.where(trained_BxT, masked.real(x_BxT), 0)

  values_BxT = chosen(values_BxT)
  targets_BxT = jax.lax.stop_gradient(chosen(batch.value_targets))
  error_BxT = (values_BxT - targets_BxT) ** 2
  metrics = {}
  count = jnp.sum(trained_BxT).astype(values_BxT.dtype)
  if options.value_clip:
    old_BxT = jax.lax.stop_gradient(chosen(batch.old_values))
    bounded_BxT = jnp.clip(
        values_BxT, old_BxT - options.value_clip, old_BxT + options.value_clip
    )
    clipped_BxT = (bounded_BxT - targets_BxT) ** 2
    worse_BxT = trained_BxT & (clipped_BxT > error_BxT)
    metrics['value/clip_fraction'] = Mean(
        jnp.sum(worse_BxT).astype(values_BxT.dtype), count
    )
    error_BxT = jnp.maximum(error_BxT, clipped_BxT)
  weight_BxT = chosen(_weights(batch)[0])
  loss = Mean(jnp.sum(weight_BxT * error_BxT) / 2, loss_count(batch))
  metrics['value/prediction'] = Mean(jnp.sum(values_BxT), count)
  metrics['value/target'] = Mean(jnp.sum(targets_BxT), count)
  return loss, jax.tree.map(jax.lax.stop_gradient, metrics)


def explained_variance(
    batch: TrajectoryBatch, scores: Scores, advantages: Advantages
) -> Mean:
  """1 - Var(target - value) / Var(target) over tokens whose value is trained.

  1 for a critic that is always right, 0 for one that says a constant, below 0
  for a worse one; 0 when all targets are equal.
  """
  trained_BxT = returns.sampled(batch)
  if advantages.value_mask is not None:
    trained_BxT = trained_BxT & advantages.value_mask
  targets_BxT = advantages.value_targets
  variance = masked.masked_variance(targets_BxT, trained_BxT)
  left = masked.masked_variance(targets_BxT - scores.values, trained_BxT)
  some = masked.spread(targets_BxT, trained_BxT) > masked.SPREAD_TOLERANCE
  return Mean(jnp.where(some, variance - left, 0), jnp.where(some, variance, 0))
