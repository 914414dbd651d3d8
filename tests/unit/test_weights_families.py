"""config.json and GGUF metadata to ModelConfig, and what is refused."""

import pytest

from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.weights import families

LLAMA = {
    'model_type': 'llama',
    'vocab_size': 100,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'hidden_act': 'silu',
}
QWEN3 = {**LLAMA, 'model_type': 'qwen3', 'num_key_value_heads': 2}
GGUF = {
    'general.architecture': 'llama',
    'llama.block_count': 2,
    'llama.embedding_length': 32,
    'llama.feed_forward_length': 64,
    'llama.attention.head_count': 4,
    'llama.attention.head_count_kv': 2,
    'llama.attention.layer_norm_rms_epsilon': 9.999999747378752e-06,
    'llama.rope.dimension_count': 8,
}
SHAPES = {'token_embd.weight': (100, 32)}


def test_llama_defaults():
  fields = families.from_hf(LLAMA)
  assert fields['num_kv_heads'] == 4
  assert fields['head_dim'] == 8
  assert fields['rope_theta'] == 10_000.0
  assert not fields['tied_head'] and not fields['qkv_bias']
  assert set(fields) == set(families.ARCHITECTURE)


def test_rope_theta_of_either_transformers_version():
  assert families.from_hf({**LLAMA, 'rope_theta': 5e5})['rope_theta'] == 5e5
  new = {'rope_parameters': {'rope_theta': 1e6, 'rope_type': 'default'}}
  assert families.from_hf({**LLAMA, **new})['rope_theta'] == 1e6


def test_families_differ_in_bias_and_norm():
  assert families.from_hf(QWEN3)['qk_norm']
  assert families.from_hf(QWEN3)['head_dim'] == 128  # the family's default
  qwen2 = families.from_hf({**QWEN3, 'model_type': 'qwen2'})
  assert qwen2['qkv_bias'] and not qwen2['qk_norm']
  assert qwen2['head_dim'] == 8


@pytest.mark.parametrize(
    'change, said',
    [
        ({'model_type': 'gemma3'}, "model_type='gemma3'"),
        ({'model_type': None}, 'model_type=None'),
        ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
        ({'attention_bias': True}, 'attention_bias=True'),
        ({'mlp_bias': True}, 'mlp_bias=True'),
        ({'use_sliding_window': True}, 'use_sliding_window=True'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config'),
        ({'rope_scaling': {'type': 'linear', 'factor': 2.0}}, 'linear'),
        ({'rope_scaling': {'rope_type': 'llama3'}}, 'llama3'),
        ({'rope_parameters': {'rope_type': 'yarn'}}, 'yarn'),
        ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
        ({'layer_types': ['sliding_attention']}, 'sliding_attention'),
        ({'hidden_size': None}, 'lacks hidden_size'),
    ],
)
def test_unsupported_configs_are_named(change, said):
  with pytest.raises(ValueError, match=said):
    families.from_hf({**LLAMA, **change})


def test_gguf_metadata():
  fields = families.from_gguf(GGUF, SHAPES)
  assert fields['norm_eps'] == 1e-5  # not its float32 neighbour
  assert fields['vocab_size'] == 100 and fields['head_dim'] == 8
  assert fields['tied_head'] and not fields['qkv_bias']
  untied = families.from_gguf(GGUF, {**SHAPES, 'output.weight': (100, 32)})
  assert not untied['tied_head']
  assert families.interleaved(GGUF)
  assert not families.interleaved({'general.architecture': 'qwen2'})


@pytest.mark.parametrize(
    'change, shapes, said',
    [
        ({'general.architecture': 'gemma3'}, {}, 'gemma3'),
        ({'llama.rope.scaling.type': 'yarn'}, {}, 'yarn'),
        ({'llama.rope.dimension_count': 4}, {}, 'dimension_count=4'),
        ({'llama.expert_count': 8}, {}, 'expert_count=8'),
        ({'llama.attention.sliding_window': 512}, {}, 'sliding_window=512'),
        ({'llama.attention.head_count_kv': [2, 1]}, {}, 'layers must be alike'),
        ({'llama.block_count': None}, {}, 'lacks block_count'),
        ({}, {'rope_freqs.weight': (4,)}, 'rope_freqs.weight'),
    ],
)
def test_unsupported_gguf_is_named(change, shapes, said):
  with pytest.raises(ValueError, match=said):
    families.from_gguf({**GGUF, **change}, {**SHAPES, **shapes})


@pytest.mark.parametrize(
    'options, family',
    [
        ({}, 'llama'),
        ({'qkv_bias': True}, 'qwen2'),
        ({'qk_norm': True}, 'qwen3'),
    ],
)
def test_config_round_trip(options, family):
  config = ModelConfig(vocab_size=50, head_dim=16, rope_theta=5e4, **options)
  raw = families.to_hf(config, 'float32')
  assert raw['model_type'] == family
  assert ModelConfig(**families.from_hf(raw)) == config


def test_no_family_for_bias_with_norm():
  config = ModelConfig(vocab_size=50, qkv_bias=True, qk_norm=True)
  with pytest.raises(ValueError, match='no Hugging Face family'):
    families.to_hf(config, 'float32')
