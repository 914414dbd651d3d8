"""Loss aggregation as per-token weights, fixed before rows are split.

Every loss here is sum(weight * per-token loss) / sum(denominator), both
summed over whatever micro-batches, packed bins and devices hold the tokens and
divided once.  Weights and denominators are made on whole rows and groups, so
the result cannot depend on how they are split afterwards.

Leaves out the per-token losses.  Invariant: padding, rows of weight 0 and
tokens that the policy did not sample have weight = denominator = 0; a batch
without tokens gives 0 / 0, which `batch.Mean` reads as 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import masked

Array = jax.Array

AGGREGATIONS = (
    'token-mean',
    'seq-mean-token-mean',
    'seq-mean-token-sum',
    'seq-mean-token-sum-norm',
    'token-sum',
    'prompt-mean',
)


def token_weights(
    mask_BxT: Array,
    weight_B: Array,
    group_B: Array,
    mode: str,
    norm_length: float = 0.0,
) -> tuple[Array, Array]:
  """Weight and denominator of each token, for whole rows of a mini-batch.

  With w a row's weight, n its masked tokens, L the per-token loss:
    token-mean               sum(w L) / sum(w n)                     (DAPO)
    seq-mean-token-mean      mean over rows of (sum L / n)           (GRPO)
    seq-mean-token-sum       mean over rows of (sum L)
    seq-mean-token-sum-norm  mean over rows of (sum L / norm_length) (Dr. GRPO)
    token-sum                sum(w L)
    prompt-mean              mean over groups of (sum(w L) / sum(w n))
  Means over rows and groups count those that have tokens with weight.

  Args:
    mask_BxT: bool, sampled tokens.
    weight_B: Weight of each row, 0 for padding.
    group_B: int32 dense group ids in [0, B).
    mode: One of AGGREGATIONS.
    norm_length: Constant length in tokens, for seq-mean-token-sum-norm.

  Returns:
    (weight, denominator), each [B, T].
  """
  rows = mask_BxT.shape[0]
  weight_B = masked.real(weight_B)
  weight_BxT = jnp.where(mask_BxT, weight_B[:, None], 0)
  length_B = jnp.sum(mask_BxT, axis=1)
  # Sums over a row to the row's weight.
  per_row_BxT = weight_BxT / jnp.maximum(length_B, 1)[:, None]
  if mode == 'token-mean':
    return weight_BxT, weight_BxT
  if mode == 'seq-mean-token-mean':
    return per_row_BxT, per_row_BxT
  if mode == 'seq-mean-token-sum':
    return weight_BxT, per_row_BxT
  if mode == 'seq-mean-token-sum-norm':
    if norm_length <= 0:
      raise ValueError(
          f'seq-mean-token-sum-norm got norm_length={norm_length}: set it to '
          'the most action tokens that a row may have'
      )
    return weight_BxT / norm_length, per_row_BxT
  if mode == 'token-sum':
    return weight_BxT, _over(weight_BxT, jnp.sum(weight_BxT)[None, None])
  if mode == 'prompt-mean':
    tokens_B = jax.ops.segment_sum(
        weight_B * length_B, group_B, num_segments=rows
    )[group_B]
    per_group_BxT = _over(weight_BxT, tokens_B[:, None])
    return per_group_BxT, per_group_BxT
  raise ValueError(f'aggregation {mode!r} is none of {AGGREGATIONS}')


def _over(x_BxT: Array, divisor: Array) -> Array:
  """x / divisor, 0 where the divisor is 0."""
  return jnp.where(divisor > 0, x_BxT / jnp.where(divisor > 0, divisor, 1), 0)
