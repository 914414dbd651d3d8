"""The transformer block in linen: initializers with axis names beside them.

A block does not know how keys and values are kept: it is handed `attend`, a
function of this layer's (q, k, v) that returns the heads' outputs and
whatever it wants to carry out (a cache).  So training, prefill and decoding
run the same block, and their log-probs agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from agent_rl_jax.models.config import DTYPES, ModelConfig

Array = jax.Array
# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> (out [B,T,N,H], carried)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, in float32."""

  eps: float
  param_dtype: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = self.param(
        'scale',
        nn.with_partitioning(nn.initializers.ones, ('norm',)),
        (x.shape[-1],),
        self.param_dtype,
    )
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (y * scale).astype(x.dtype)


class Linear(nn.Module):
  """x @ kernel (+ bias), with kernel as [in, out].

  Leading axes are flattened first: on CPUs the gradient of a [B,T,D]
  projection is three times slower than that of the same one as [B*T,D].
  """

  features: int
  axes: tuple[str, str]
  bias: bool
  param_dtype: Any
  init_scale: float = 1.0

  @nn.compact
  def __call__(self, x: Array) -> Array:
    width = x.shape[-1]
    init = nn.initializers.variance_scaling(
        self.init_scale, 'fan_in', 'truncated_normal'
    )
    kernel = self.param(
        'kernel',
        nn.with_partitioning(init, self.axes),
        (width, self.features),
        self.param_dtype,
    )
    y = x.reshape(-1, width) @ kernel.astype(x.dtype)
    if self.bias:
      bias = self.param(
          'bias',
          nn.with_partitioning(nn.initializers.zeros, (self.axes[1],)),
          (self.features,),
          self.param_dtype,
      )
      y = y + bias.astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], self.features)


def rotary(positions_BxT: Array, head_dim: int, theta: float) -> Array:
  """Angles [B, T, H/2], float32: position * theta^(-2i/H)."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  return (
      positions_BxT.astype(jnp.float32)[..., None]
      * (theta**-exponent)[None, None]
  )


def rotate(x_BxTxNxH: Array, angles: Array) -> Array:
  """Turns each half-split pair of `x` by its angle (Llama convention)."""
  first, second = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
  turned = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return turned.astype(x_BxTxNxH.dtype)


class Block(nn.Module):
  """Pre-norm attention and SwiGLU with residuals."""

  config: ModelConfig

  @nn.compact
  def __call__(
      self, x_BxTxD: Array, angles: Array, attend: Attend
  ) -> tuple[Array, Any]:
    cfg = self.config
    param_dtype = DTYPES[cfg.param_dtype]
    b, t, _ = x_BxTxD.shape

    def linear(name, features, axes, bias=False, init_scale=1.0):
      return Linear(features, axes, bias, param_dtype, init_scale, name=name)

    def norm(name):
      return RMSNorm(cfg.norm_eps, param_dtype, name=name)

    # Residual branches start small, so that depth does not scale the stream.
    out_scale = 1.0 / (2 * cfg.num_layers)
    y = norm('attn_norm')(x_BxTxD)
    q_width = cfg.num_heads * cfg.head_dim
    kv_width = cfg.num_kv_heads * cfg.head_dim
    q = linear('q', q_width, ('embed', 'heads'), cfg.qkv_bias)(y)
    k = linear('k', kv_width, ('embed', 'kv_heads'), cfg.qkv_bias)(y)
    v = linear('v', kv_width, ('embed', 'kv_heads'), cfg.qkv_bias)(y)
    q = q.reshape(b, t, cfg.num_heads, cfg.head_dim)
    k = k.reshape(b, t, cfg.num_kv_heads, cfg.head_dim)
    v = v.reshape(b, t, cfg.num_kv_heads, cfg.head_dim)
    if cfg.qk_norm:
      q, k = norm('q_norm')(q), norm('k_norm')(k)
    q, k = rotate(q, angles), rotate(k, angles)
    out, carried = attend(q, k, v)
    out = out.reshape(b, t, q_width)
    x_BxTxD = x_BxTxD + linear(
        'o', cfg.width, ('heads', 'embed'), init_scale=out_scale
    )(out)
    y = norm('mlp_norm')(x_BxTxD)
    gate = linear('gate', cfg.mlp_width, ('embed', 'mlp'))(y)
    up = linear('up', cfg.mlp_width, ('embed', 'mlp'))(y)
    down = linear('down', cfg.width, ('mlp', 'embed'), init_scale=out_scale)
    return x_BxTxD + down(nn.silu(gate) * up), carried
