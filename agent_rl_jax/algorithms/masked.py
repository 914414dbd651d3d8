"""Sums, means and variances over the tokens that a mask selects.

Leaves out anything per group or per row.  Invariant: values are selected
before any arithmetic, so a NaN or an infinity outside the mask reaches neither
the result nor its gradient.  Statistics are float32, float64 for float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

# A spread of at most this counts as no spread: what is left is rounding.
SPREAD_TOLERANCE = 1e-6


def real(x: Array) -> Array:
  """x in the precision of statistics: float32, or float64 if it is that."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked_sum(x: Array, mask: Array, axis: int | None = None) -> Array:
  """Sum of x where mask is true; x and mask have one shape."""
  return jnp.sum(jnp.where(mask, real(x), 0), axis=axis)


def masked_mean(x: Array, mask: Array, axis: int | None = None) -> Array:
  """Mean of x where mask is true, 0 where nothing is."""
  count = jnp.sum(mask, axis=axis)
  return masked_sum(x, mask, axis) / jnp.maximum(count, 1)


def masked_variance(x: Array, mask: Array) -> Array:
  """Unbiased two-pass variance of x where mask is true, 0 for one value."""
  centered = real(x) - masked_mean(x, mask)
  count = jnp.sum(mask)
  return masked_sum(centered**2, mask) / jnp.maximum(count - 1, 1)


def spread(x: Array, mask: Array) -> Array:
  """Largest minus smallest x where mask is true, 0 where nothing is."""
  x = real(x)
  high = jnp.max(jnp.where(mask, x, -jnp.inf))
  low = jnp.min(jnp.where(mask, x, jnp.inf))
  return jnp.where(jnp.any(mask), high - low, 0)


@jax.jit
def whiten(x: Array, mask: Array, epsilon: float = 1e-8) -> Array:
  """(x - mean) / sqrt(variance + epsilon) on the mask, 0 elsewhere.

  Values without spread give exactly 0, not rounding noise over epsilon.
  """
  scale = jax.lax.rsqrt(masked_variance(x, mask) + epsilon)
  keep = mask & (spread(x, mask) > SPREAD_TOLERANCE)
  return jnp.where(keep, (real(x) - masked_mean(x, mask)) * scale, 0)
