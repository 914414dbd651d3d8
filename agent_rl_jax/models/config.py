"""Shape of a policy: one frozen dataclass, hashable, no defaults that hide.

The well-known decoder families are settings of it: Llama and SmolLM2 (plain),
Qwen2.5 (`qkv_bias`), Qwen3 (`qk_norm`).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer (RMSNorm, rotary, GQA, SwiGLU).

  Attributes:
    vocab_size: V, rows of the embedding.
    num_layers: L.
    width: D.
    num_heads: N query heads.
    num_kv_heads: K key/value heads; divides N.
    head_dim: H, even (rotary turns pairs).
    mlp_width: F.
    rope_theta: Base of the rotary frequencies.
    norm_eps: Added to the mean square in RMSNorm.
    tied_head: Whether the output head is the embedding table.
    qkv_bias: Biases on q, k, v (Qwen2).
    qk_norm: RMSNorm on each head's q and k before rotary (Qwen3).
    dtype: Computation type of activations.
    param_dtype: Storage type of parameters in training.
    remat: Recompute each block in the backward pass.
    head_megabytes: Target size of one piece of float32 logits in the loss;
      the head is applied in rematerialized pieces of at most that size.
  """

  vocab_size: int
  num_layers: int = 2
  width: int = 128
  num_heads: int = 4
  num_kv_heads: int = 4
  head_dim: int = 32
  mlp_width: int = 384
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tied_head: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  remat: bool = False
  head_megabytes: int = 64

  def __post_init__(self):
    for field in (
        'vocab_size',
        'num_layers',
        'width',
        'num_heads',
        'num_kv_heads',
        'head_dim',
        'mlp_width',
        'head_megabytes',
    ):
      if getattr(self, field) < 1:
        raise ValueError(
            f'model.{field}={getattr(self, field)}: must be at least 1'
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'model.num_heads={self.num_heads} is not a multiple of'
          f' model.num_kv_heads={self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(
          f'model.head_dim={self.head_dim}: rotary needs an even head width'
      )
    for field in ('dtype', 'param_dtype'):
      if getattr(self, field) not in DTYPES:
        raise ValueError(
            f'model.{field}={getattr(self, field)!r}: one of {sorted(DTYPES)}'
        )
