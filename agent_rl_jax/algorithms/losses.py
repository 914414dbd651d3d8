"""Policy losses over the sampled tokens of a LossBatch.

LOSSES[name](logprobs, batch, options) gives the policy term alone;
`policy_loss` adds the KL to the reference and the entropy bonus.  Both give a
Mean whose total and count are summed over micro-batches, then divided once;
metrics are Means and Extremes, so they do not depend on the split either.

Leaves out how rows are weighed (`aggregate`) and the value loss (`value`).
Invariants: advantages, old log-probs and corrections are constants; nothing
off the mask reaches value or gradient, NaN included; losses that reduce over
a row read `segment`, so rows packed side by side do not mix.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agent_rl_jax.algorithms import kl as kl_lib
from agent_rl_jax.algorithms import masked
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import Extreme, LossBatch, Mean

Array = jax.Array
Metrics = dict[str, Mean | Extreme]
Loss = Callable[[Array, LossBatch, LossOptions], tuple[Mean, Metrics]]


def row_sum(x_BxT: Array, segment_BxT: Array) -> Array:
  """Sum of x over each packed row, on every token of it: [B, T]."""
  length = x_BxT.shape[1]

  def one_bin(x_T, segment_T):
    total_K = jax.ops.segment_sum(x_T, segment_T, num_segments=length + 1)
    return total_K[segment_T]

  return jax.vmap(one_bin)(x_BxT, segment_BxT)


def row_mean(x_BxT: Array, mask_BxT: Array, segment_BxT: Array) -> Array:
  """Mean of x over the masked tokens of each packed row, on its tokens."""
  x_BxT = jnp.where(mask_BxT, x_BxT, 0)
  count_BxT = row_sum(mask_BxT.astype(x_BxT.dtype), segment_BxT)
  return row_sum(x_BxT, segment_BxT) / jnp.maximum(count_BxT, 1)


def _active(batch: LossBatch) -> Array:
  """bool [B, T]: sampled tokens of rows that the loss counts."""
  return batch.mask & (batch.weight != 0)


def _advantages(batch: LossBatch) -> Array:
  chosen_BxT = jnp.where(_active(batch), batch.advantages, 0)
  return jax.lax.stop_gradient(masked.real(chosen_BxT))


def _logprobs(logprobs_BxT: Array, batch: LossBatch) -> Array:
  """Log-probs with 0 off the mask, selected before anything is computed."""
  return masked.real(jnp.where(_active(batch), logprobs_BxT, 0))


def _raw_log_ratio(logprobs_BxT: Array, batch: LossBatch) -> Array:
  old_BxT = jnp.where(_active(batch), batch.old_logprobs, 0)
  return _logprobs(logprobs_BxT, batch) - jax.lax.stop_gradient(old_BxT)


def _log_ratio(logprobs_BxT: Array, batch: LossBatch) -> Array:
  """Clamped to +-20: no overflow, and no gradient where the clamp binds."""
  limit = kl_lib.LOG_RATIO_LIMIT
  return jnp.clip(_raw_log_ratio(logprobs_BxT, batch), -limit, limit)


def _reduce(per_token_BxT: Array, batch: LossBatch, corrected: bool) -> Mean:
  active_BxT = _active(batch)
  weight_BxT = jnp.where(active_BxT, batch.weight, 0)
  if batch.denominator is None:
    denominator_BxT = weight_BxT
  else:
    denominator_BxT = jnp.where(active_BxT, batch.denominator, 0)
  if corrected and batch.correction is not None:
    correction_BxT = jnp.where(active_BxT, batch.correction, 0)
    weight_BxT = weight_BxT * jax.lax.stop_gradient(correction_BxT)
  per_token_BxT = jnp.where(active_BxT, per_token_BxT, 0)
  return Mean(jnp.sum(weight_BxT * per_token_BxT), jnp.sum(denominator_BxT))


def _token_mean(x_BxT: Array, batch: LossBatch) -> Mean:
  """Metrics are means over tokens whatever the loss aggregates by."""
  active_BxT = _active(batch)
  x_BxT = jax.lax.stop_gradient(masked.real(x_BxT))
  return Mean(
      masked.masked_sum(x_BxT, active_BxT),
      jnp.sum(active_BxT).astype(x_BxT.dtype),
  )


def _extreme(x_BxT: Array, batch: LossBatch, sign: int) -> Extreme:
  """The largest x of a counted token, or with sign -1 the smallest."""
  x_BxT = sign * jax.lax.stop_gradient(masked.real(x_BxT))
  return Extreme(jnp.max(jnp.where(_active(batch), x_BxT, -jnp.inf)), sign)


def _ratio_metrics(log_ratio_BxT: Array, batch: LossBatch) -> Metrics:
  ratio_BxT = jnp.exp(log_ratio_BxT)
  return {
      'policy/approx_kl': _token_mean(-log_ratio_BxT, batch),
      'policy/ratio': _token_mean(ratio_BxT, batch),
      'policy/ratio_max': _extreme(ratio_BxT, batch, 1),
      'policy/ratio_min': _extreme(ratio_BxT, batch, -1),
  }


def _clipped(
    ratio_BxT: Array, advantages_BxT: Array, options: LossOptions
) -> tuple[Array, Array]:
  """PPO's pessimistic maximum, and where the clip changed it."""
  bounded_BxT = jnp.clip(ratio_BxT, 1 - options.clip_low, 1 + options.clip_high)
  plain_BxT = -advantages_BxT * ratio_BxT
  clip_BxT = -advantages_BxT * bounded_BxT
  return jnp.maximum(plain_BxT, clip_BxT), clip_BxT > plain_BxT


def ppo_clip(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """max(-A r, -A clip(r)), for A < 0 at most -dual_clip A.

  Schulman et al. 2017, eq. 7, with the separate bounds of DAPO (Yu et al.
  2025, arXiv 2503.14476) and the dual clip of Ye et al. 2020
  (arXiv 1912.09729).
  """
  log_ratio_BxT = _log_ratio(logprobs_BxT, batch)
  advantages_BxT = _advantages(batch)
  loss_BxT, clipped_BxT = _clipped(
      jnp.exp(log_ratio_BxT), advantages_BxT, options
  )
  metrics = _ratio_metrics(log_ratio_BxT, batch)
  metrics['policy/clip_fraction'] = _token_mean(clipped_BxT, batch)
  if options.dual_clip > 0:
    negative_BxT = advantages_BxT < 0
    bound_BxT = -options.dual_clip * advantages_BxT
    metrics['policy/dual_clip_fraction'] = _token_mean(
        negative_BxT & (loss_BxT > bound_BxT), batch
    )
    loss_BxT = jnp.where(
        negative_BxT, jnp.minimum(loss_BxT, bound_BxT), loss_BxT
    )
  return _reduce(loss_BxT, batch, corrected=True), metrics


def gspo(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """PPO's clip on the row's ratio, the geometric mean of its tokens' ratios.

  GSPO-token (Zheng et al. 2025, arXiv 2507.18071): the value holds the row's
  ratio, the gradient passes through each token's own log-prob.
  """
  log_ratio_BxT = _raw_log_ratio(logprobs_BxT, batch)
  row_BxT = jax.lax.stop_gradient(
      row_mean(log_ratio_BxT, _active(batch), batch.segment)
  )
  chosen_BxT = _logprobs(logprobs_BxT, batch)
  through_BxT = chosen_BxT - jax.lax.stop_gradient(chosen_BxT) + row_BxT
  # Bounded above alone: a row's mean never underflows harmfully.
  ratio_BxT = jnp.exp(jnp.minimum(through_BxT, 10.0))
  loss_BxT, clipped_BxT = _clipped(ratio_BxT, _advantages(batch), options)
  metrics = _ratio_metrics(_log_ratio(logprobs_BxT, batch), batch)
  metrics['policy/clip_fraction'] = _token_mean(clipped_BxT, batch)
  return _reduce(loss_BxT, batch, corrected=True), metrics


def cispo(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """-sg(clip(r)) A log p (CISPO): no token loses its gradient.

  MiniMax-M1 (2025, arXiv 2506.13585).  The value holds log p and is not comparable to that of ppo_clip.
  """
  log_ratio_BxT = _log_ratio(logprobs_BxT, batch)
  ratio_BxT = jnp.exp(log_ratio_BxT)
  bounded_BxT = jax.lax.stop_gradient(
      jnp.clip(ratio_BxT, 1 - options.clip_low, 1 + options.clip_high)
  )
  loss_BxT = -bounded_BxT * _advantages(batch) * _logprobs(logprobs_BxT, batch)
  metrics = _ratio_metrics(log_ratio_BxT, batch)
  metrics['policy/clip_fraction'] = _token_mean(ratio_BxT != bounded_BxT, batch)
  return _reduce(loss_BxT, batch, corrected=True), metrics


def sapo(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate instead of a clip.

  SAPO (Gao et al. 2025), tau by the advantage's sign.
  """
  log_ratio_BxT = _log_ratio(logprobs_BxT, batch)
  advantages_BxT = _advantages(batch)
  tau_BxT = jnp.where(
      advantages_BxT > 0, options.sapo_positive, options.sapo_negative
  ).astype(advantages_BxT.dtype)
  gate_BxT = jax.nn.sigmoid(tau_BxT * (jnp.exp(log_ratio_BxT) - 1))
  loss_BxT = -advantages_BxT * gate_BxT * 4 / tau_BxT
  metrics = _ratio_metrics(log_ratio_BxT, batch)
  return _reduce(loss_BxT, batch, corrected=True), metrics


def gmpo(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """-A times the geometric mean of the row's ratios, clipped in log space.

  GMPO (Zhao et al. 2025, arXiv 2507.20673); A is the row's mean advantage, and the
  bounds apply to the log-ratio of each token.
  """
  log_ratio_BxT = _log_ratio(logprobs_BxT, batch)
  advantages_BxT = _advantages(batch)
  sign_BxT = jnp.sign(advantages_BxT)
  bounded_BxT = jnp.clip(log_ratio_BxT, -options.clip_low, options.clip_high)
  clipped_BxT = sign_BxT * jnp.minimum(
      sign_BxT * log_ratio_BxT, sign_BxT * bounded_BxT
  )
  active_BxT = _active(batch)
  row_BxT = jnp.exp(row_mean(clipped_BxT, active_BxT, batch.segment))
  row_advantage_BxT = row_mean(advantages_BxT, active_BxT, batch.segment)
  metrics = _ratio_metrics(log_ratio_BxT, batch)
  metrics['policy/clip_fraction'] = _token_mean(
      clipped_BxT != log_ratio_BxT, batch
  )
  loss_BxT = -row_advantage_BxT * row_BxT
  return _reduce(loss_BxT, batch, corrected=True), metrics


def opsm_keep(logprobs_BxT: Array, batch: LossBatch, delta: float) -> Array:
  """bool [B, T]: False where A < 0 in a row that left the old policy.

  Off-policy sequence masking (DeepSeek-V3.2): such rows have a mean
  of log old - log new above delta.  Dropped tokens stay in the denominator.
  """
  gap_BxT = jax.lax.stop_gradient(-_raw_log_ratio(logprobs_BxT, batch))
  row_BxT = row_mean(gap_BxT, _active(batch), batch.segment)
  return ~((_advantages(batch) < 0) & (row_BxT > delta))


def reinforce(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """-A log p: the plain policy gradient (Williams 1992)."""
  del options
  loss_BxT = -_advantages(batch) * _logprobs(logprobs_BxT, batch)
  metrics = _ratio_metrics(_log_ratio(logprobs_BxT, batch), batch)
  return _reduce(loss_BxT, batch, corrected=True), metrics


def sft(
    logprobs_BxT: Array, batch: LossBatch, options: LossOptions
) -> tuple[Mean, Metrics]:
  """-log p of the masked tokens; advantages and old log-probs are unread."""
  del options
  loss_BxT = -_logprobs(logprobs_BxT, batch)
  metrics = {'policy/nll': _token_mean(loss_BxT, batch)}
  return _reduce(loss_BxT, batch, corrected=False), metrics


LOSSES: dict[str, Loss] = {
    'ppo_clip': ppo_clip,
    'gspo': gspo,
    'cispo': cispo,
    'sapo': sapo,
    'gmpo': gmpo,
    'reinforce': reinforce,
    'sft': sft,
}


def policy_loss(
    logprobs_BxT: Array,
    entropy_BxT: Array | None,
    batch: LossBatch,
    options: LossOptions,
    kl_coef: Array | float | None = None,
) -> tuple[Mean, Metrics]:
  """The whole policy objective: loss + kl_coef KL - entropy_coef entropy.

  Both terms share the loss's aggregation.  `kl_coef` replaces
  `options.kl_coef` (an adaptive coefficient).

  Args:
    logprobs_BxT: Of `batch.tokens` under the policy being trained.
    entropy_BxT: Of the distribution each token was drawn from, in nats, or
      None if it is not computed; then `entropy_coef` must be 0.
    batch: Packed or plain rows.
    options: Static.

  Raises:
    ValueError: A term lacks its input, or `denominator` is missing where
      the aggregation needs it.
  """
  if batch.denominator is None and options.aggregation != 'token-mean':
    raise ValueError(
        f'aggregation {options.aggregation!r} needs LossBatch.denominator: '
        'fill weight and denominator with aggregate.token_weights'
    )
  dropped = {}
  if options.opsm_delta:
    keep_BxT = opsm_keep(logprobs_BxT, batch, options.opsm_delta)
    dropped['policy/opsm_fraction'] = _token_mean(~keep_BxT, batch)
    weight_BxT = jnp.ones_like(batch.weight)
    if batch.correction is not None:
      weight_BxT = batch.correction
    batch = batch.replace(correction=jnp.where(keep_BxT, weight_BxT, 0))
  mean, metrics = LOSSES[options.loss](logprobs_BxT, batch, options)
  metrics = metrics | dropped
  total = mean.total
  if batch.reference_logprobs is not None:
    reference_BxT = batch.reference_logprobs
    gap_BxT = kl_lib.kl_penalty(
        logprobs_BxT, reference_BxT, _active(batch), 'k3'
    )
    metrics['policy/kl_reference'] = _token_mean(gap_BxT, batch)
  if options.kl != 'none' and options.kl_placement == 'loss':
    if batch.reference_logprobs is None:
      raise ValueError(
          f'kl={options.kl!r} in the loss needs reference log-probs: score '
          'the batch with the reference policy, or set kl=none'
      )
    penalty_BxT = kl_lib.kl_penalty(
        logprobs_BxT, batch.reference_logprobs, _active(batch), options.kl
    )
    if options.kl_importance:
      # DeepSeek-V3.2: the samples are the old policy's, the KL the new one's.
      penalty_BxT = penalty_BxT * jnp.exp(_log_ratio(logprobs_BxT, batch))
    coef = options.kl_coef if kl_coef is None else kl_coef
    penalty = _reduce(penalty_BxT, batch, corrected=False)
    total = total + coef * penalty.total
    metrics['policy/kl_penalty'] = penalty
  if entropy_BxT is not None:
    metrics['policy/entropy'] = _token_mean(entropy_BxT, batch)
  if options.entropy_coef:
    if entropy_BxT is None:
      raise ValueError(
          f'entropy_coef={options.entropy_coef} needs the entropy of each '
          'token: have the log-prob pass compute it, or set it to 0'
      )
    bonus = _reduce(entropy_BxT, batch, corrected=False)
    total = total - options.entropy_coef * bonus.total
  metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
  return Mean(total, mean.count), metrics
