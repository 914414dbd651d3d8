"""Estimators of KL(policy, reference) from log-probs of sampled tokens.

With x = log policy - log reference of the sampled token (Schulman, "Approximating
KL divergence", 2020):

  name  value           gradient   remark
  k1    x               1          unbiased; as a loss its gradient averages to 0
  abs   |x|             sign x
  k2    x^2 / 2         x          on-policy, the gradient of the KL itself
  k3    e^-x + x - 1    1 - e^-x   unbiased, never negative

A name with '+' has that estimator's value and k2's gradient (straight
through).  Leaves out reduction and coefficient, but for the adaptive
controller's update.  Invariant: x is clamped to +-20 and k3 to [-10, 10], with
no gradient where a clamp binds, so every value is finite.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

LOG_RATIO_LIMIT = 20.0


def _k3(x: Array) -> Array:
  return jnp.clip(jnp.exp(-x) + x - 1, -10, 10)


KL: dict[str, Callable[[Array], Array]] = {
    'k1': lambda x: x,
    # Not jnp.abs, whose gradient at 0, where training starts, is 1.
    'abs': lambda x: x * jnp.sign(x),
    'k2': lambda x: x**2 / 2,
    'k3': _k3,
}

KL_KINDS = (*KL, *(f'{name}+' for name in KL))


def kl_penalty(
    logprobs: Array, reference: Array, mask: Array, kind: str
) -> Array:
  """Per-token KL estimate of `kind`, 0 off the mask; all one shape."""
  x = jnp.where(mask, logprobs, 0) - jnp.where(mask, reference, 0)
  x = jnp.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  value = KL[kind.removesuffix('+')](x)
  if kind.endswith('+'):
    slope = KL['k2'](x)
    value = jax.lax.stop_gradient(value - slope) + slope
  return value


def adapted_coef(
    coef: Array, mean_kl: Array, target: float, horizon: float, episodes: Array
) -> Array:
  """Next coefficient of the adaptive controller (Ziegler et al. 2019).

  coef (1 + e episodes / horizon) with e = clip(mean_kl / target - 1, +-0.2).
  """
  error = jnp.clip(mean_kl / target - 1, -0.2, 0.2)
  return coef * (1 + error * episodes / horizon)
