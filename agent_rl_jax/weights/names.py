"""One table: our parameter path <- Hugging Face name, GGUF name, transform.

Families (Llama and SmolLM2, Qwen2, Qwen3) differ in which rows of the table
apply, never in a table of their own.  Invariant: for a given ModelConfig every
parameter comes from exactly one name (per layer for blocks), and both
transforms are undone by `to_checkpoint`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_rl_jax.models.config import ModelConfig

HF, GGUF = 'hf', 'gguf'


@dataclasses.dataclass(frozen=True)
class Name:
  """One row of the table.

  Attributes:
    path: Parameter path, dots between keys; 'blocks.' leaves are stacked.
    hf: Name in a Hugging Face checkpoint, {} for the layer.
    gguf: Name in a GGUF file, {} for the layer.
    axes: Our shape, one letter an axis, without the layer: V, D, F, H, and
      Q = N*H, K = K*H for what heads share.  Checkpoints keep matrices whose
      path ends in 'kernel' transposed, as (out, in).
    heads: ModelConfig field that counts the heads whose halves Llama GGUF
      files interleave; '' for everything that is not query or key.
    when: ModelConfig field that must be true for the row to apply; '!' in
      front of it: false.
  """

  path: str
  hf: str
  gguf: str
  axes: str
  heads: str = ''
  when: str = ''

  @property
  def stacked(self) -> bool:
    return self.path.startswith('blocks.')

  @property
  def transposed(self) -> bool:
    return self.path.endswith('.kernel')


TABLE: tuple[Name, ...] = (
    Name('embed.table', 'model.embed_tokens.weight', 'token_embd.weight', 'VD'),
    Name('final_norm.scale', 'model.norm.weight', 'output_norm.weight', 'D'),
    Name('head.table', 'lm_head.weight', 'output.weight', 'VD',
         when='!tied_head'),
    Name('blocks.attn_norm.scale', 'model.layers.{}.input_layernorm.weight',
         'blk.{}.attn_norm.weight', 'D'),
    Name('blocks.q.kernel', 'model.layers.{}.self_attn.q_proj.weight',
         'blk.{}.attn_q.weight', 'DQ', heads='num_heads'),
    Name('blocks.k.kernel', 'model.layers.{}.self_attn.k_proj.weight',
         'blk.{}.attn_k.weight', 'DK', heads='num_kv_heads'),
    Name('blocks.v.kernel', 'model.layers.{}.self_attn.v_proj.weight',
         'blk.{}.attn_v.weight', 'DK'),
    Name('blocks.o.kernel', 'model.layers.{}.self_attn.o_proj.weight',
         'blk.{}.attn_output.weight', 'QD'),
    Name('blocks.q.bias', 'model.layers.{}.self_attn.q_proj.bias',
         'blk.{}.attn_q.bias', 'Q', heads='num_heads', when='qkv_bias'),
    Name('blocks.k.bias', 'model.layers.{}.self_attn.k_proj.bias',
         'blk.{}.attn_k.bias', 'K', heads='num_kv_heads', when='qkv_bias'),
    Name('blocks.v.bias', 'model.layers.{}.self_attn.v_proj.bias',
         'blk.{}.attn_v.bias', 'K', when='qkv_bias'),
    Name('blocks.q_norm.scale', 'model.layers.{}.self_attn.q_norm.weight',
         'blk.{}.attn_q_norm.weight', 'H', when='qk_norm'),
    Name('blocks.k_norm.scale', 'model.layers.{}.self_attn.k_norm.weight',
         'blk.{}.attn_k_norm.weight', 'H', when='qk_norm'),
    Name('blocks.mlp_norm.scale',
         'model.layers.{}.post_attention_layernorm.weight',
         'blk.{}.ffn_norm.weight', 'D'),
    Name('blocks.gate.kernel', 'model.layers.{}.mlp.gate_proj.weight',
         'blk.{}.ffn_gate.weight', 'DF'),
    Name('blocks.up.kernel', 'model.layers.{}.mlp.up_proj.weight',
         'blk.{}.ffn_up.weight', 'DF'),
    Name('blocks.down.kernel', 'model.layers.{}.mlp.down_proj.weight',
         'blk.{}.ffn_down.weight', 'FD'),
)  # fmt: skip


def names(config: ModelConfig) -> tuple[Name, ...]:
  """The rows of the table that apply to `config`."""

  def applies(row: Name) -> bool:
    if row.when.startswith('!'):
      return not getattr(config, row.when[1:])
    return not row.when or getattr(config, row.when)

  return tuple(row for row in TABLE if applies(row))


def shape(config: ModelConfig, row: Name) -> tuple[int, ...]:
  """Shape of a parameter, without the layer axis."""
  sizes = {
      'V': config.vocab_size,
      'D': config.width,
      'F': config.mlp_width,
      'H': config.head_dim,
      'Q': config.num_heads * config.head_dim,
      'K': config.num_kv_heads * config.head_dim,
  }
  return tuple(sizes[axis] for axis in row.axes)


def checkpoint_names(
    config: ModelConfig, row: Name, kind: str
) -> tuple[str, ...]:
  """The names of a parameter in a checkpoint of `kind`, one a layer."""
  pattern = {HF: row.hf, GGUF: row.gguf}[kind]
  if not row.stacked:
    return (pattern,)
  return tuple(pattern.format(i) for i in range(config.num_layers))


def checkpoint_shapes(
    config: ModelConfig, kind: str
) -> dict[str, tuple[int, ...]]:
  """Every tensor that a checkpoint of `config` holds, with its shape there."""
  out = {}
  for row in names(config):
    size = shape(config, row)
    size = size[::-1] if row.transposed else size
    out.update(dict.fromkeys(checkpoint_names(config, row, kind), size))
  return out


def from_checkpoint(
    config: ModelConfig, row: Name, array: np.ndarray, interleaved: bool
) -> np.ndarray:
  """One checkpoint tensor in our layout: [out, in] becomes [in, out].

  Args:
    config: Shape of the policy.
    row: The parameter.
    array: The tensor as the checkpoint keeps it.
    interleaved: Whether query and key rows are stored in rotary pairs (GGUF
      of the llama family) and go back to the two halves of rotate-half.
  """
  if interleaved and row.heads:
    array = _unpermute(array, getattr(config, row.heads))
  return array.T if row.transposed else array


def to_checkpoint(row: Name, array: np.ndarray) -> np.ndarray:
  """The inverse of `from_checkpoint` for a Hugging Face checkpoint."""
  return array.T if row.transposed else array


def _unpermute(array: np.ndarray, heads: int) -> np.ndarray:
  """Rows (head, pair, half) to (head, half, pair), over the first axis."""
  pairs = array.shape[0] // heads // 2
  split = array.reshape(heads, pairs, 2, *array.shape[1:])
  return split.swapaxes(1, 2).reshape(array.shape)


def get(params: Mapping[str, Any], path: str) -> Any:
  """The leaf of a parameter tree at a dotted path."""
  for key in path.split('.'):
    params = params[key]
  return params


def put(params: dict[str, Any], path: str, leaf: Any) -> None:
  """Sets the leaf at a dotted path, making the mappings on the way."""
  *parents, last = path.split('.')
  for key in parents:
    params = params.setdefault(key, {})
  params[last] = leaf


def count(config: ModelConfig) -> int:
  """Number of parameters."""
  return sum(
      math.prod(shape(config, row)) * (config.num_layers if row.stacked else 1)
      for row in names(config)
  )
