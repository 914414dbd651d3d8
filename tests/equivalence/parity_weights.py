"""Seeded tiny checkpoints and their golden logits, for the parity tests.

The weights of a case are a function of (seed, tensor name) alone, so that a
golden file needs to hold only the config, the tokens and the logits that
transformers gave.  `python -m tests.equivalence.parity_weights` writes the
files anew; it needs the [parity] extra.
"""

from __future__ import annotations

import hashlib
import json
import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
SEED = 20
_COMMON = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'hidden_act': 'silu',
    'max_position_embeddings': 128,
}
CONFIGS = {
    'llama': {
        **_COMMON,
        'model_type': 'llama',
        'rope_theta': 100_000.0,
        'rms_norm_eps': 1e-5,
        'tie_word_embeddings': True,
    },
    'qwen2': {
        **_COMMON,
        'model_type': 'qwen2',
        'rope_theta': 1_000_000.0,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
    },
    # Heads wider than width / heads, as in the small models of the family.
    'qwen3': {
        **_COMMON,
        'model_type': 'qwen3',
        'head_dim': 16,
        'rope_theta': 1_000_000.0,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': True,
    },
}


def tensors(raw: dict, seed: int) -> dict[str, np.ndarray]:
  """A checkpoint's tensors by Hugging Face name, written out by hand.

  Norms and biases are random too: at their usual values of one and zero a
  forgotten or swapped one would not show.
  """
  width, mlp = raw['hidden_size'], raw['intermediate_size']
  head_dim = raw.get('head_dim', width // raw['num_attention_heads'])
  q = raw['num_attention_heads'] * head_dim
  kv = raw['num_key_value_heads'] * head_dim
  shapes = {
      'model.embed_tokens.weight': (raw['vocab_size'], width),
      'model.norm.weight': (width,),
  }
  if not raw['tie_word_embeddings']:
    shapes['lm_head.weight'] = (raw['vocab_size'], width)
  for i in range(raw['num_hidden_layers']):
    layer = {
        'input_layernorm.weight': (width,),
        'post_attention_layernorm.weight': (width,),
        'self_attn.q_proj.weight': (q, width),
        'self_attn.k_proj.weight': (kv, width),
        'self_attn.v_proj.weight': (kv, width),
        'self_attn.o_proj.weight': (width, q),
        'mlp.gate_proj.weight': (mlp, width),
        'mlp.up_proj.weight': (mlp, width),
        'mlp.down_proj.weight': (width, mlp),
    }
    if raw['model_type'] == 'qwen2':
      layer |= {'self_attn.q_proj.bias': (q,)}
      layer |= {f'self_attn.{x}_proj.bias': (kv,) for x in 'kv'}
    if raw['model_type'] == 'qwen3':
      layer |= {f'self_attn.{x}_norm.weight': (head_dim,) for x in 'qk'}
    shapes |= {f'model.layers.{i}.{k}': v for k, v in layer.items()}
  return {name: _values(name, shape, seed) for name, shape in shapes.items()}


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  digest = hashlib.sha256(f'{seed} {name}'.encode()).digest()
  key = int.from_bytes(digest[:16], 'little')
  rng = np.random.Generator(np.random.Philox(key=key))
  values = rng.standard_normal(shape)
  if name.endswith('norm.weight'):
    return (1 + 0.2 * values).astype(np.float32)
  return (0.25 * values).astype(np.float32)


def token_ids(raw: dict, count: int = 24) -> np.ndarray:
  rng = np.random.Generator(np.random.Philox(key=SEED))
  return rng.integers(0, raw['vocab_size'], count).astype(np.int32)


def write_folder(folder: pathlib.Path, raw: dict, seed: int) -> pathlib.Path:
  """Writes a case as a Hugging Face folder, without the code under test."""
  from safetensors.numpy import save_file

  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(raw))
  save_file(tensors(raw, seed), folder / 'model.safetensors')
  return folder


def our_logits(config, params, ids: np.ndarray) -> np.ndarray:
  """Our full forward pass over one row: float32 [T, V]."""
  import jax
  import jax.numpy as jnp

  from agent_rl_jax.models import policy

  @jax.jit
  def run(params, tokens_BxT):
    positions_BxT = jnp.arange(tokens_BxT.shape[1])[None]
    segment_BxT = jnp.ones_like(tokens_BxT)
    x_BxTxD = policy.hidden(
        config, params, tokens_BxT, positions_BxT, segment_BxT
    )
    return policy.logits(config, params, x_BxTxD)

  return np.asarray(run(params, jnp.asarray(ids[None])))[0]


def torch_model(raw: dict, state: dict[str, np.ndarray]):
  """The transformers model of a config.json with these tensors, float32."""
  import torch
  import transformers

  config = transformers.AutoConfig.for_model(**raw)
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(
      config, dtype=torch.float32
  )
  found = model.load_state_dict(
      {name: torch.from_numpy(a) for name, a in state.items()}, strict=False
  )
  # A tied head has no tensor of its own.
  assert set(found.missing_keys) <= {'lm_head.weight'}, found
  assert not found.unexpected_keys, found
  model.tie_weights()
  return model.eval()


def torch_logits(model, ids: np.ndarray) -> np.ndarray:
  import torch

  with torch.no_grad():
    out = model(torch.from_numpy(np.asarray(ids, np.int64))[None])
  return out.logits[0].float().numpy()


def main() -> None:
  import torch
  import transformers

  for family, raw in CONFIGS.items():
    ids = token_ids(raw)
    logits = torch_logits(torch_model(raw, tensors(raw, SEED)), ids)
    golden = {
        'source': (
            f'transformers {transformers.__version__},'
            f' torch {torch.__version__}, float32, eager attention'
        ),
        'config': raw,
        'seed': SEED,
        'tokens': ids.tolist(),
        'logits': [[round(float(x), 6) for x in row] for row in logits],
    }
    text = json.dumps(golden)
    (GOLDEN / f'logits_{family}.json').write_text(text + '\n')


if __name__ == '__main__':
  main()
