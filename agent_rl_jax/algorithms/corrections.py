"""Corrections for a sampler whose probabilities differ from the trainer's.

Compares log-probs of the policy at the start of the update (old) with those
that the sampler recorded, on whole rows and before packing.  Leaves out the
ratio of new to old policy (`losses`) and OPSM, which reads it.  Invariants:
weights are constants; tokens that were not sampled have a gap of 0 whatever
placeholder they hold; metrics are there whether or not a correction applies
(the caller leaves all of it out where old log-probs are the sampler's own).
"""

from __future__ import annotations

import flax
import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import kl, masked, returns
from agent_rl_jax.algorithms.options import CorrectionOptions
from agent_rl_jax.batch import Mean, Scores, TrajectoryBatch

Array = jax.Array


@flax.struct.dataclass
class Correction:
  """weight [B, T] on the per-token loss; keep bool [B, T]; metrics."""

  weight: Array | None
  keep: Array | None
  metrics: dict[str, Mean]


def _exp(x: Array) -> Array:
  return jnp.exp(jnp.clip(x, -kl.LOG_RATIO_LIMIT, kl.LOG_RATIO_LIMIT))


def _by_level(gap_BxT: Array, mask_BxT: Array, level: str) -> Array:
  """The gap of each token, or its sum, mean or maximum over the row."""
  if level == 'token':
    return gap_BxT
  if level == 'max':
    row_B = jnp.max(jnp.where(mask_BxT, gap_BxT, -jnp.inf), axis=1)
    row_B = jnp.where(jnp.any(mask_BxT, axis=1), row_B, 0)
  elif level == 'sum':
    row_B = masked.masked_sum(gap_BxT, mask_BxT, axis=1)
  else:
    row_B = masked.masked_mean(gap_BxT, mask_BxT, axis=1)
  return jnp.broadcast_to(row_B[:, None], gap_BxT.shape)


def unbounded_weights(gap_BxT: Array, mask_BxT: Array, name: str) -> Array:
  """What correction `name` bounds, [B, T]: a ratio of token or row.

  Of the token ('tis', 'icepop'), of the row's product ('_sequence'), or of its
  geometric mean ('_geometric').
  """
  _, _, level = name.partition('_')
  level = {'': 'token', 'sequence': 'sum', 'geometric': 'mean'}[level]
  return jnp.where(mask_BxT, _exp(_by_level(gap_BxT, mask_BxT, level)), 0)


def _bounded(weight_BxT: Array, name: str, low: float, high: float) -> Array:
  if name.startswith('tis'):
    return jnp.clip(weight_BxT, low, high)
  inside_BxT = (weight_BxT >= low) & (weight_BxT <= high)
  return jnp.where(inside_BxT, weight_BxT, 0)


def importance_weights(
    gap_BxT: Array, mask_BxT: Array, name: str, low: float, high: float
) -> Array:
  """Weights [B, T] from gap = log old - log sampler, 0 off the mask.

  'tis*' clips the weight into [low, high] (Yao et al. 2025), 'icepop*' sets it
  to 0 outside (Ling team 2025); which weight: `unbounded_weights`.
  """
  weight_BxT = unbounded_weights(gap_BxT, mask_BxT, name)
  return jnp.where(mask_BxT, _bounded(weight_BxT, name, low, high), 0)


def kept(
    gap_BxT: Array, mask_BxT: Array, name: str, low: float, high: float
) -> Array:
  """bool [B, T]: tokens of the mask that rejection `name` leaves in.

  name is level_estimator: 'token', 'seq_sum', 'seq_mean' or 'seq_max' of k1
  (the ratio old / sampler, kept in [low, high]; seq_mean_k1 is geometric
  rejection), k2 = gap^2 / 2 or k3 = e^gap - 1 - gap (kept up to high).
  """
  level, _, estimator = name.rpartition('_')
  level = level.removeprefix('seq_')
  if estimator == 'k1':
    ratio_BxT = _exp(_by_level(gap_BxT, mask_BxT, level))
    return mask_BxT & (ratio_BxT >= low) & (ratio_BxT <= high)
  gap_BxT = jnp.clip(gap_BxT, -kl.LOG_RATIO_LIMIT, kl.LOG_RATIO_LIMIT)
  if estimator == 'k2':
    value_BxT = gap_BxT**2 / 2
  else:
    value_BxT = jnp.exp(gap_BxT) - 1 - gap_BxT
  return mask_BxT & (_by_level(value_BxT, mask_BxT, level) <= high)


def mismatch_metrics(
    old_BxT: Array, sampler_BxT: Array, mask_BxT: Array
) -> dict[str, Array]:
  """Scalars that say how far sampler and trainer are apart.

  kl_k1 and kl_k3 estimate KL(sampler, old) per token in nats; weight_* are of
  the uncorrected ratio; ess is the effective share of samples; chi2_* are its
  variances; perplexities are means over rows.
  """
  old_BxT = jnp.where(mask_BxT, masked.real(old_BxT), 0)
  sampler_BxT = jnp.where(mask_BxT, masked.real(sampler_BxT), 0)
  gap_BxT = old_BxT - sampler_BxT
  weight_BxT = _exp(gap_BxT)
  row_weight_B = _exp(masked.masked_sum(gap_BxT, mask_BxT, axis=1))
  some_B = jnp.any(mask_BxT, axis=1)
  square = masked.masked_mean(weight_BxT**2, mask_BxT)
  mean = masked.masked_mean(weight_BxT, mask_BxT)
  old_B = -masked.masked_mean(old_BxT, mask_BxT, axis=1)
  sampler_B = -masked.masked_mean(sampler_BxT, mask_BxT, axis=1)
  any_token = jnp.any(mask_BxT)
  return {
      'kl_k1': masked.masked_mean(-gap_BxT, mask_BxT),
      'kl_k3': masked.masked_mean(weight_BxT - gap_BxT - 1, mask_BxT),
      'weight_mean': mean,
      'weight_max': jnp.max(jnp.where(mask_BxT, weight_BxT, 0)),
      'gap_max': jnp.max(jnp.abs(gap_BxT)),
      'ess': mean**2 / jnp.where(any_token, square, 1),
      'chi2_token': jnp.where(any_token, square - 1, 0),
      'chi2_row': jnp.where(
          any_token, masked.masked_mean(row_weight_B**2, some_B) - 1, 0
      ),
      'old_log_ppl': masked.masked_mean(old_B, some_B),
      'sampler_log_ppl': masked.masked_mean(sampler_B, some_B),
      'log_ppl_gap': masked.masked_mean(jnp.abs(old_B - sampler_B), some_B),
  }


def correct(
    batch: TrajectoryBatch, scores: Scores, options: CorrectionOptions
) -> Correction:
  """Weights and kept tokens for a batch, with metrics under correction/.

  changed_fraction is the share of tokens whose weight a bound changed.
  `weight` is None without a correction, `keep` without a rejection.  With
  rejection_denominator='original' rejected tokens get weight 0 and stay in
  `keep`; with 'kept' the caller takes them out of the action mask before
  `aggregate.token_weights`.
  """
  mask_BxT = returns.sampled(batch) & (batch.weight != 0)[:, None]
  old_BxT = jnp.where(mask_BxT, masked.real(scores.old_logprobs), 0)
  sampler_BxT = jnp.where(mask_BxT, masked.real(batch.sampler_logprobs), 0)
  gap_BxT = old_BxT - sampler_BxT
  metrics = {
      f'correction/{name}': Mean(value, jnp.ones_like(value))
      for name, value in mismatch_metrics(
          old_BxT, sampler_BxT, mask_BxT
      ).items()
  }
  tokens = jnp.sum(mask_BxT).astype(gap_BxT.dtype)
  weight_BxT = keep_BxT = None
  if options.correction != 'none':
    weight_BxT = importance_weights(
        gap_BxT,
        mask_BxT,
        options.correction,
        options.correction_low,
        options.correction_high,
    )
    cut_BxT = weight_BxT != unbounded_weights(
        gap_BxT, mask_BxT, options.correction
    )
    if options.correction_normalize:
      weight_BxT = normalized_weights(weight_BxT, mask_BxT, options.correction)
    metrics['correction/changed_fraction'] = Mean(
        jnp.sum(cut_BxT & mask_BxT).astype(gap_BxT.dtype), tokens
    )
  if options.rejection != 'none':
    keep_BxT = kept(
        gap_BxT,
        mask_BxT,
        options.rejection,
        options.rejection_low,
        options.rejection_high,
    )
    rejected = jnp.sum(mask_BxT & ~keep_BxT).astype(gap_BxT.dtype)
    metrics['correction/rejected_fraction'] = Mean(rejected, tokens)
    if options.rejection_denominator == 'original':
      if weight_BxT is None:
        weight_BxT = jnp.ones_like(gap_BxT)
      weight_BxT = jnp.where(keep_BxT, weight_BxT, 0)
      keep_BxT = None
  return jax.tree.map(
      jax.lax.stop_gradient, Correction(weight_BxT, keep_BxT, metrics)
  )


def normalized_weights(weight_BxT: Array, mask_BxT: Array, name: str) -> Array:
  """Weights over their mean: over tokens, or over rows for row weights."""
  if name in ('tis', 'icepop'):
    mean = masked.masked_mean(weight_BxT, mask_BxT)
  else:
    mean = masked.masked_mean(
        masked.masked_mean(weight_BxT, mask_BxT, axis=1),
        jnp.any(mask_BxT, axis=1),
    )
  return weight_BxT / jnp.where(mean > 0, mean, 1)
