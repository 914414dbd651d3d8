"""The critic's loss.

Leaves out the critic itself (models) and its targets (`gae`, `turns`).
Invariant: tokens outside `value_mask`, where there is one, train no value and
are not counted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import LossBatch, Mean

Array = jax.Array


def value_loss(
    values_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, dict[str, Mean]]:
  """max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2, aggregated.

  The clipped value loss of PPO's reference code; targets are constants.

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
  trained_BxT = batch.mask & (batch.weight != 0)
  if batch.value_mask is not None:
    trained_BxT = trained_BxT & batch.value_mask

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
  weight_BxT = chosen(batch.weight)
  denominator = batch.weight if batch.denominator is None else batch.denominator
  loss = Mean(jnp.sum(weight_BxT * error_BxT) / 2, jnp.sum(chosen(denominator)))
  metrics['value/prediction'] = Mean(jnp.sum(values_BxT), count)
  metrics['value/target'] = Mean(jnp.sum(targets_BxT), count)
  return loss, jax.tree.map(jax.lax.stop_gradient, metrics)
