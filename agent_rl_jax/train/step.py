"""The train step: micro-batches of a LossBatch into one optimizer update.

One function for RL and SFT, with and without a critic, for one device and for
a mesh.  Leaves out what the losses are (`algorithms`) and how rows were packed.
Invariants: gradients, losses and metrics are sums over micro-batches, divided
once, each loss by its own count, or extremes over all of them, so the result
does not depend on how tokens are split; an update whose gradient is not finite
leaves parameters and optimizer state as they were and is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agent_rl_jax.algorithms.losses import policy_loss
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.algorithms.value import loss_count, value_loss
from agent_rl_jax.batch import Extreme, LossBatch, Mean
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.value import logprobs_and_values
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train.options import CriticOptions
from agent_rl_jax.train.score import gap_metrics
from agent_rl_jax.train.state import TrainState, state_shardings, trainable_axes

Array = jax.Array
Metrics = dict[str, Mean | Extreme]
TrainStep = Callable[
    [TrainState, LossBatch, Array, Array], tuple[TrainState, Metrics]
]


def drift_metrics(logprobs: Array, micro: LossBatch) -> Metrics:
  """|trainer - sampler| log-prob, its mean and its maximum.

  'policy/drift' is of counted tokens, 'policy/logprob_gap' of those among them
  that are `own`: in the first update of a rollout batch both sides have the
  same weights there, so that it is what the two implementations differ by.
  """
  counted = micro.mask & (micro.weight != 0)
  gap = jnp.abs(jax.lax.stop_gradient(logprobs) - micro.sampler_logprobs)
  own = counted if micro.own is None else counted & micro.own
  return gap_metrics('policy/drift', gap, counted) | gap_metrics(
      'policy/logprob_gap', gap, own
  )


def _nothing(metrics: Metrics) -> Metrics:
  """What sums and extremes of no micro-batch are; from shapes alone."""
  fill = lambda metric: -jnp.inf if isinstance(metric, Extreme) else 0
  return {
      name: jax.tree.map(
          lambda x, m=metric: jnp.full(x.shape, fill(m), x.dtype), metric
      )
      for name, metric in metrics.items()
  }


def _value_scale(batch: LossBatch, num_micro: Array, coef: float) -> Array:
  """What a value-loss total weighs beside a policy-loss total.

  The sum of both is divided by the policy's count; so that the value loss is
  divided by its own, it is first multiplied by their ratio.
  """
  read = jnp.arange(batch.tokens.shape[0]) < num_micro
  batch = batch.replace(mask=batch.mask & read[:, None, None])
  count = loss_count(batch)
  whole = loss_count(batch.replace(value_weight=None, value_denominator=None))
  return jnp.where(
      count > 0, coef * whole / jnp.where(count > 0, count, 1), 0.0
  )


def make_gradient(
    config: ModelConfig,
    options: LossOptions,
    *,
    temperature: float = 1.0,
    critic: CriticOptions = CriticOptions(),  # noqa: B008 (frozen)
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Callable[..., tuple[Any, Metrics]]:
  """Builds `(trainable, batch, num_micro, kl_coef) -> (gradient, metrics)`.

  The gradient is that of total / count over the first `num_micro`
  micro-batches, accumulated in float32; with a critic, that of the policy
  loss plus value_coef times the value loss.  metrics['train/loss'] holds the
  policy loss and metrics['value/loss'] the other.  Arguments as in
  `make_train_step`.
  """
  sampled = options.loss != 'sft'

  def micro_loss(trainable, micro: LossBatch, kl_coef, value_scale):
    logprobs, entropy, values = logprobs_and_values(
        config,
        trainable,
        micro.tokens,
        micro.positions,
        micro.segment,
        temperature,
        critic.stop_gradient,
        part,
    )
    mean, metrics = policy_loss(logprobs, entropy, micro, options, kl_coef)
    total, metrics = mean.total, dict(metrics)
    metrics['train/loss'] = jax.lax.stop_gradient(mean)
    if values is not None:
      mean, more = value_loss(values, micro, options)
      total = total + value_scale * mean.total
      metrics |= more | {'value/loss': jax.lax.stop_gradient(mean)}
    if sampled:
      metrics |= drift_metrics(logprobs, micro)
    return total, metrics

  def gradient(trainable, batch: LossBatch, num_micro, kl_coef):
    pin = lambda grads: grads
    if part.mesh is not None:
      shardings = part.tree(trainable_axes(config, critic.kind))
      pin = lambda grads: jax.lax.with_sharding_constraint(grads, shardings)
    num_micro = jnp.minimum(num_micro, batch.tokens.shape[0])
    value_scale = None
    if critic.kind != 'none':
      value_scale = _value_scale(batch, num_micro, critic.value_coef)

    def micro_gradient(i):
      micro = jax.tree.map(lambda x: x[i], batch)
      (_, metrics), grads = jax.value_and_grad(micro_loss, has_aux=True)(
          trainable, micro, kl_coef, value_scale
      )
      return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

    def body(i, carry):
      grads, metrics = carry
      more, more_metrics = micro_gradient(i)
      return (
          pin(jax.tree.map(jnp.add, grads, more)),
          {name: metrics[name] + more_metrics[name] for name in metrics},
      )

    grads, metrics = jax.eval_shape(micro_gradient, 0)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    carry = (pin(zeros), _nothing(metrics))
    grads, metrics = jax.lax.fori_loop(0, num_micro, body, carry)
    count = metrics['train/loss'].count
    scale = jnp.where(count > 0, 1 / jnp.where(count > 0, count, 1), 0.0)
    return jax.tree.map(lambda g: g * scale, grads), metrics

  return gradient


def _clip(
    grads: dict[str, Any],
    norms: dict[str, Array],
    limits: dict[str, float],
    finite: Array,
) -> tuple[dict[str, Any], dict[str, Array]]:
  """Each top-level key's gradient within its own norm, and which were cut."""
  out, clipped = {}, {}
  for name, limit in limits.items():
    out[name], clipped[name] = grads[name], jnp.zeros((), bool)
    if limit > 0:
      cut = finite & (norms[name] > limit)
      scale = jnp.where(cut, limit / norms[name], 1.0)
      out[name] = jax.tree.map(lambda g, s=scale: g * s, grads[name])
      clipped[name] = cut
  return out, clipped


def _keep(apply: Array, new: Any, old: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def make_train_step(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    options: LossOptions,
    *,
    max_grad_norm: float = 0.0,
    temperature: float = 1.0,
    reference: bool = False,
    critic: CriticOptions = CriticOptions(),  # noqa: B008 (frozen)
    critic_grad_norm: float = 0.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> TrainStep:
  """Compiled `(state, batch, num_micro, kl_coef) -> (state, metrics)`.

  `batch` is a LossBatch [M, b, L]; the first `num_micro` (int32 scalar)
  micro-batches are read.  `kl_coef` (float32 scalar) is the coefficient of the
  KL, for adaptive ones.  The state is donated.

  Args:
    config: Shape of the policy.
    tx: Optimizer, as in `init_state`; with a critic from `make_optimizers`.
    options: The losses and their terms; static.
    max_grad_norm: Global-norm clip of the policy's gradient; 0 for none.
    temperature: That of the sampling.
    reference: Whether the state has a frozen reference.
    critic: Which critic the state has, and how its loss counts.
    critic_grad_norm: Global-norm clip of the critic's gradient; 0 for none.
    part: Mesh and rules; pins the sharding of every output.

  Returns:
    The step.  Metrics are Means and Extremes: those of the loss, 'train/loss',
    'train/grad_norm' (before the clip; finite ones), 'train/clipped',
    'train/skipped' (nothing moved), 'train/nonfinite' (for that reason), and
    those of `drift_metrics`.  With a critic
    those of the value loss too, 'value/loss', 'value/grad_norm' and
    'value/clipped'.  While the critic warms up the policy and the state of its
    optimizer keep every bit, and its gradient is a metric alone.
  """
  gradient = make_gradient(
      config, options, temperature=temperature, critic=critic, part=part
  )
  limits = {'policy': max_grad_norm}
  if critic.kind != 'none':
    limits['critic'] = critic_grad_norm

  def step(state: TrainState, batch: LossBatch, num_micro, kl_coef):
    grads, metrics = gradient(state.trainable, batch, num_micro, kl_coef)
    norms = {name: optax.tree.norm(grads[name]) for name in limits}
    finite = functools.reduce(
        jnp.logical_and, map(jnp.isfinite, norms.values())
    )
    grads, clipped = _clip(grads, norms, limits, finite)
    # Without tokens there is no gradient, and momentum alone is no update.
    apply = {'policy': finite & (metrics['train/loss'].count > 0)}
    if critic.kind != 'none':
      apply['critic'] = finite & (metrics['value/loss'].count > 0)
      apply['policy'] &= state.step >= critic.warmup_updates
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.trainable)
    updates, opt_state = tx.update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    if critic.kind == 'none':
      opt_state = _keep(apply['policy'], opt_state, state.opt_state)
    else:
      opt_state = {
          name: _keep(apply[name], opt_state[name], state.opt_state[name])
          for name in apply
      }
    skipped = ~functools.reduce(jnp.logical_or, apply.values())
    one = jnp.ones((), jnp.float32)
    number = lambda flag: flag.astype(jnp.float32)
    for name, area in (('policy', 'train'), ('critic', 'value')):
      if name in limits:
        norm = jnp.where(finite, norms[name], 0)
        metrics[f'{area}/grad_norm'] = Mean(norm, number(finite))
        metrics[f'{area}/clipped'] = Mean(number(clipped[name]), one)
    metrics['train/skipped'] = Mean(number(skipped), one)
    metrics['train/nonfinite'] = Mean(number(~finite), one)
    return (
        state.replace(
            step=state.step + 1,
            skipped=state.skipped + skipped.astype(jnp.int32),
            trainable={
                name: _keep(apply[name], trainable[name], state.trainable[name])
                for name in apply
            },
            opt_state=opt_state,
        ),
        metrics,
    )

  shardings = state_shardings(
      config, tx, reference=reference, critic=critic.kind, part=part
  )
  if shardings is None:
    return jax.jit(step, donate_argnums=0)
  return jax.jit(
      step, donate_argnums=0, out_shardings=(shardings, part.replicated())
  )
