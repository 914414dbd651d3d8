"""The train step: micro-batches of a LossBatch into one optimizer update.

One function for RL and SFT, for one device and for a mesh.  Leaves out what
the loss is (`algorithms`) and how rows were packed.  Invariants: gradients,
losses and metrics are sums over micro-batches, divided once, so the result
does not depend on how tokens are split; an update whose gradient is not finite
leaves parameters and optimizer state as they were and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agent_rl_jax.algorithms.losses import policy_loss
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import LossBatch, Mean
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.logprobs import token_logprobs
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train.state import TrainState, state_shardings, trainable_axes

Array = jax.Array
Metrics = dict[str, Mean]
TrainStep = Callable[
    [TrainState, LossBatch, Array, Array], tuple[TrainState, Metrics]
]


def _gap(logprobs: Array, micro: LossBatch) -> tuple[Mean, Array]:
  """|trainer - sampler| on counted tokens: its mean and its maximum."""
  active = micro.mask & (micro.weight != 0)
  gap = jnp.abs(jax.lax.stop_gradient(logprobs) - micro.sampler_logprobs)
  gap = jnp.where(active, gap, 0.0)
  return Mean(jnp.sum(gap), jnp.sum(active, dtype=jnp.float32)), jnp.max(gap)


def make_gradient(
    config: ModelConfig,
    options: LossOptions,
    *,
    temperature: float = 1.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Callable[..., tuple[Any, Metrics, dict[str, Array]]]:
  """Builds `(trainable, batch, num_micro, kl_coef) -> (gradient, ...)`.

  The gradient is that of total / count over the first `num_micro`
  micro-batches, accumulated in float32.  Returns (gradient, metrics, maxima);
  metrics['train/loss'] holds the loss.  Arguments as in `make_train_step`.
  """
  sampled = options.loss != 'sft'

  def micro_loss(trainable, micro: LossBatch, kl_coef):
    logprobs, entropy = token_logprobs(
        config,
        trainable['policy'],
        micro.tokens,
        micro.positions,
        micro.segment,
        temperature,
        part,
    )
    mean, metrics = policy_loss(logprobs, entropy, micro, options, kl_coef)
    metrics, maxima = dict(metrics), {}
    metrics['train/loss'] = jax.lax.stop_gradient(mean)
    if sampled:
      gap, worst = _gap(logprobs, micro)
      metrics['policy/drift'] = gap
      maxima['policy/drift_max'] = worst
    return mean.total, (metrics, maxima)

  def gradient(trainable, batch: LossBatch, num_micro, kl_coef):
    pin = lambda grads: grads
    if part.mesh is not None:
      shardings = part.tree(trainable_axes(config))
      pin = lambda grads: jax.lax.with_sharding_constraint(grads, shardings)

    def micro_gradient(i):
      micro = jax.tree.map(lambda x: x[i], batch)
      (_, aux), grads = jax.value_and_grad(micro_loss, has_aux=True)(
          trainable, micro, kl_coef
      )
      return jax.tree.map(lambda g: g.astype(jnp.float32), grads), aux

    def body(i, carry):
      grads, metrics, maxima = carry
      more, (more_metrics, more_maxima) = micro_gradient(i)
      add = lambda a, b: jax.tree.map(jnp.add, a, b)
      return (
          pin(add(grads, more)),
          add(metrics, more_metrics),
          jax.tree.map(jnp.maximum, maxima, more_maxima),
      )

    grads, (metrics, maxima) = jax.eval_shape(micro_gradient, 0)
    zeros = lambda tree: jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), tree
    )
    carry = (pin(zeros(grads)), zeros(metrics), zeros(maxima))
    num_micro = jnp.minimum(num_micro, batch.tokens.shape[0])
    grads, metrics, maxima = jax.lax.fori_loop(0, num_micro, body, carry)
    count = metrics['train/loss'].count
    scale = jnp.where(count > 0, 1 / jnp.where(count > 0, count, 1), 0.0)
    return jax.tree.map(lambda g: g * scale, grads), metrics, maxima

  return gradient


def make_train_step(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    options: LossOptions,
    *,
    max_grad_norm: float = 0.0,
    temperature: float = 1.0,
    reference: bool = False,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> TrainStep:
  """Compiled `(state, batch, num_micro, kl_coef) -> (state, metrics)`.

  `batch` is a LossBatch [M, b, L]; the first `num_micro` (int32 scalar)
  micro-batches are read.  `kl_coef` (float32 scalar) is the coefficient of the
  KL, for adaptive ones.  The state is donated.

  Args:
    config: Shape of the policy.
    tx: Optimizer, as in `init_state`.
    options: The loss and its terms; static.
    max_grad_norm: Global-norm clip; 0 for none.
    temperature: That of the sampling.
    reference: Whether the state has a frozen reference.
    part: Mesh and rules; pins the sharding of every output.

  Returns:
    The step.  Metrics are Means: those of the loss, 'train/loss',
    'train/grad_norm' (before the clip; finite ones), 'train/clipped',
    'train/skipped', 'policy/drift' and its maximum (Mean of count 1): how far
    the current policy's log-probs are from the sampler's.
  """
  gradient = make_gradient(config, options, temperature=temperature, part=part)

  def step(state: TrainState, batch: LossBatch, num_micro, kl_coef):
    grads, metrics, maxima = gradient(
        state.trainable, batch, num_micro, kl_coef
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    # Without tokens there is no gradient, and momentum alone is no update.
    apply = finite & (metrics['train/loss'].count > 0)
    clipped = jnp.zeros((), bool)
    if max_grad_norm > 0:
      clipped = finite & (norm > max_grad_norm)
      scale = jnp.where(clipped, max_grad_norm / norm, 1.0)
      grads = jax.tree.map(lambda g: g * scale, grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.trainable)
    updates, opt_state = tx.update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    keep = lambda new, old: jnp.where(apply, new, old)
    one = jnp.ones((), jnp.float32)
    number = lambda flag: flag.astype(jnp.float32)
    metrics |= {name: Mean(value, one) for name, value in maxima.items()}
    metrics |= {
        'train/grad_norm': Mean(jnp.where(finite, norm, 0), number(finite)),
        'train/clipped': Mean(number(clipped), one),
        'train/skipped': Mean(number(~apply), one),
    }
    return (
        state.replace(
            step=state.step + 1,
            skipped=state.skipped + (~apply).astype(jnp.int32),
            trainable=jax.tree.map(keep, trainable, state.trainable),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        ),
        metrics,
    )

  shardings = state_shardings(config, tx, reference=reference, part=part)
  if shardings is None:
    return jax.jit(step, donate_argnums=0)
  return jax.jit(
      step, donate_argnums=0, out_shardings=(shardings, part.replicated())
  )
