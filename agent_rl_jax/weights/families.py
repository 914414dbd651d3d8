"""Model families: config.json and GGUF metadata <-> ModelConfig.

Covers Llama (SmolLM2 with it), Qwen2 and Qwen3, dense and with full
attention.  Everything else that a checkpoint can ask for (rotary scaling,
sliding windows, other activations, experts) is refused by name, since
ignoring it would give a model that runs and is subtly wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_rl_jax.models.config import ModelConfig

FAMILIES = ('llama', 'qwen2', 'qwen3')
_ARCHITECTURES = {
    'llama': 'LlamaForCausalLM',
    'qwen2': 'Qwen2ForCausalLM',
    'qwen3': 'Qwen3ForCausalLM',
}
# Head widths that transformers fills in when absent; None: width / heads.
_HEAD_DIM = {'llama': None, 'qwen2': None, 'qwen3': 128}
# ModelConfig fields that a checkpoint decides.
ARCHITECTURE = (
    'vocab_size', 'num_layers', 'width', 'num_heads', 'num_kv_heads',
    'head_dim', 'mlp_width', 'rope_theta', 'norm_eps', 'tied_head', 'qkv_bias',
    'qk_norm',
)  # fmt: skip


def from_hf(raw: Mapping[str, Any]) -> dict[str, Any]:
  """ARCHITECTURE fields of ModelConfig from the contents of a config.json.

  Raises:
    ValueError: the family or one of its options is not supported; the message
      names key and value.
  """
  family = raw.get('model_type')
  if family not in FAMILIES:
    raise ValueError(
        f'config.json: model_type={family!r} is not supported, only'
        f' {", ".join(FAMILIES)}'
    )
  rope = _hf_rope(raw)
  _refuse_hf(raw, family)
  required = _required(raw, 'config.json')
  heads = required('num_attention_heads')
  width = required('hidden_size')
  kv_heads = raw.get('num_key_value_heads')
  if kv_heads is None and family != 'llama':
    kv_heads = required('num_key_value_heads')
  head_dim = raw.get('head_dim') or _HEAD_DIM[family] or width // heads
  return {
      'vocab_size': required('vocab_size'),
      'num_layers': required('num_hidden_layers'),
      'width': width,
      'num_heads': heads,
      'num_kv_heads': heads if kv_heads is None else kv_heads,
      'head_dim': head_dim,
      'mlp_width': required('intermediate_size'),
      'rope_theta': float(rope),
      'norm_eps': float(raw.get('rms_norm_eps', 1e-6)),
      # Every one of the three families' own default is an untied head.
      'tied_head': bool(raw.get('tie_word_embeddings', False)),
      'qkv_bias': family == 'qwen2',
      'qk_norm': family == 'qwen3',
  }


def _required(raw: Mapping[str, Any], what: str):
  def get(key: str) -> Any:
    if raw.get(key) is None:
      raise ValueError(f'{what} lacks {key}, which has no default')
    if isinstance(raw[key], list):
      raise ValueError(f'{what}: {key}={raw[key]}: layers must be alike')
    return raw[key]

  return get


def _hf_rope(raw: Mapping[str, Any]) -> float:
  """The base of the rotary frequencies; scaled variants are refused."""
  # transformers 5 writes rope_parameters, earlier ones rope_theta beside
  # rope_scaling.
  for key in ('rope_parameters', 'rope_scaling'):
    value = raw.get(key) or {}
    kind = value.get('rope_type', value.get('type', 'default'))
    if kind != 'default':
      raise ValueError(
          f'config.json: {key}={value!r}: scaled rotary positions are not'
          ' supported, only rope_type "default"'
      )
  parameters = raw.get('rope_parameters') or {}
  partial = raw.get(
      'partial_rotary_factor', parameters.get('partial_rotary_factor', 1.0)
  )
  if partial not in (None, 1, 1.0):
    raise ValueError(
        f'config.json: partial_rotary_factor={partial!r}: only whole heads are'
        ' turned here'
    )
  return parameters.get('rope_theta') or raw.get('rope_theta') or 10_000.0


def _refuse_hf(raw: Mapping[str, Any], family: str) -> None:
  """Raises for the first option of config.json that has no counterpart."""
  # transformers ignores sliding_window unless use_sliding_window is set in
  # the Qwen families, and llama has no such key at all.
  allowed = {
      'hidden_act': ('silu', 'swish', None),
      'attention_bias': (False, None),
      'mlp_bias': (False, None),
      'use_sliding_window': (False, None),
      'quantization_config': (None,),
      'rope_interleaved': (False, None),
  }
  for key, values in allowed.items():
    if raw.get(key) not in values:
      raise ValueError(
          f'config.json: {key}={raw[key]!r} is not supported for {family},'
          f' only {values[0]!r}'
      )
  other = sorted(set(raw.get('layer_types') or ()) - {'full_attention'})
  if other:
    raise ValueError(
        f'config.json: layer_types={other}: only full_attention is supported'
    )


def from_gguf(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
  """ARCHITECTURE fields of ModelConfig from GGUF metadata and tensor shapes.

  Raises:
    ValueError: as `from_hf`.
  """
  family = fields.get('general.architecture')
  if family not in FAMILIES:
    raise ValueError(
        f'GGUF: general.architecture={family!r} is not supported, only'
        f' {", ".join(FAMILIES)}'
    )
  own = {
      key.removeprefix(family + '.'): value for key, value in fields.items()
      if key.startswith(family + '.')
  }  # fmt: skip
  required = _required(own, f'GGUF metadata ({family})')
  heads = required('attention.head_count')
  width = required('embedding_length')
  head_dim = own.get('attention.key_length', width // heads)
  _refuse_gguf(own, family, shapes, head_dim)
  if 'token_embd.weight' not in shapes:
    raise ValueError('GGUF: there is no tensor token_embd.weight')
  return {
      'vocab_size': shapes['token_embd.weight'][0],
      'num_layers': required('block_count'),
      'width': width,
      'num_heads': heads,
      'num_kv_heads': required('attention.head_count_kv'),
      'head_dim': head_dim,
      'mlp_width': required('feed_forward_length'),
      'rope_theta': _shortest(own.get('rope.freq_base', 10_000.0)),
      'norm_eps': _shortest(required('attention.layer_norm_rms_epsilon')),
      'tied_head': 'output.weight' not in shapes,
      'qkv_bias': 'blk.0.attn_q.bias' in shapes,
      'qk_norm': 'blk.0.attn_q_norm.weight' in shapes,
  }


def interleaved(fields: Mapping[str, Any]) -> bool:
  """Whether a GGUF file keeps query and key rows in rotary pairs."""
  return fields.get('general.architecture') == 'llama'


def _refuse_gguf(
    own: Mapping[str, Any],
    family: str,
    shapes: Mapping[str, tuple[int, ...]],
    head_dim: int,
) -> None:
  """Raises for the first option of the metadata that has no counterpart."""
  allowed = {
      'rope.scaling.type': ('none', None),
      'rope.dimension_count': (head_dim, None),
      'attention.value_length': (head_dim, None),
      'attention.sliding_window': (0, None),
      'expert_count': (0, None),
  }
  for key, values in allowed.items():
    if own.get(key) not in values:
      raise ValueError(
          f'GGUF: {family}.{key}={own[key]!r} is not supported, only'
          f' {values[0]!r}'
      )
  if 'rope_freqs.weight' in shapes:
    raise ValueError(
        'GGUF: rope_freqs.weight: scaled rotary positions (Llama 3.1 and'
        ' later) are not supported'
    )


def _shortest(value: float) -> float:
  """The shortest decimal that is the same float32: 1e-05, not 9.99...e-06."""
  return float(str(np.float32(value)))


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
  """The config.json under which other libraries load an exported policy.

  Raises:
    ValueError: no family has this combination of options.
  """
  if config.qkv_bias and config.qk_norm:
    raise ValueError(
        'model.qkv_bias and model.qk_norm together fit no Hugging Face family'
        ' (Qwen2 has the one, Qwen3 the other)'
    )
  family = (
      'qwen2' if config.qkv_bias else 'qwen3' if config.qk_norm else 'llama'
  )
  return {
      'architectures': [_ARCHITECTURES[family]],
      'model_type': family,
      'vocab_size': config.vocab_size,
      'num_hidden_layers': config.num_layers,
      'hidden_size': config.width,
      'num_attention_heads': config.num_heads,
      'num_key_value_heads': config.num_kv_heads,
      'head_dim': config.head_dim,
      'intermediate_size': config.mlp_width,
      'hidden_act': 'silu',
      # Read by transformers 4, the next one by 5; equal by construction.
      'rope_theta': config.rope_theta,
      'rope_parameters': {
          'rope_type': 'default',
          'rope_theta': config.rope_theta,
      },
      'rms_norm_eps': config.norm_eps,
      'tie_word_embeddings': config.tied_head,
      'torch_dtype': dtype,
  }
