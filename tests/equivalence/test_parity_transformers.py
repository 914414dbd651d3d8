"""Parity with transformers on tiny random weights, both ways ([parity])."""

import json

import numpy as np
import pytest

from agent_rl_jax.weights.export import export
from agent_rl_jax.weights.load import load
from tests.equivalence import parity_weights

_WHY = 'the [parity] extra (torch, transformers) is not installed'
torch = pytest.importorskip('torch', reason=_WHY)
transformers = pytest.importorskip('transformers', reason=_WHY)

FAMILIES = sorted(parity_weights.CONFIGS)


def _raw(family, tied):
  return {**parity_weights.CONFIGS[family], 'tie_word_embeddings': tied}


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('family', FAMILIES)
def test_loads_what_transformers_saves(family, tied, tmp_path):
  raw = _raw(family, tied)
  model = parity_weights.torch_model(raw, parity_weights.tensors(raw, 1))
  model.save_pretrained(tmp_path)
  config, params = load(tmp_path)
  assert config.tied_head == tied
  ids = parity_weights.token_ids(raw)
  want = parity_weights.torch_logits(model, ids)
  ours = parity_weights.our_logits(config, params, ids)
  np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('family', FAMILIES)
def test_transformers_loads_what_we_export(family, tied, tmp_path):
  raw = _raw(family, tied)
  config, params = load(
      parity_weights.write_folder(tmp_path / 'theirs', raw, 2)
  )
  out = export(config, params, tmp_path / 'ours', shard_bytes=20_000)
  assert len(list(out.glob('*.safetensors'))) > 1
  model = transformers.AutoModelForCausalLM.from_pretrained(
      out, dtype=torch.float32
  ).eval()
  assert (
      type(model).__name__
      == json.loads((out / 'config.json').read_text())['architectures'][0]
  )
  ids = parity_weights.token_ids(raw)
  ours = parity_weights.our_logits(config, params, ids)
  want = parity_weights.torch_logits(model, ids)
  np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize('family', FAMILIES)
def test_golden_is_what_transformers_gives(family):
  path = parity_weights.GOLDEN / f'logits_{family}.json'
  golden = json.loads(path.read_text())
  state = parity_weights.tensors(golden['config'], golden['seed'])
  model = parity_weights.torch_model(golden['config'], state)
  logits = parity_weights.torch_logits(model, np.asarray(golden['tokens']))
  np.testing.assert_allclose(logits, golden['logits'], rtol=0, atol=2e-5)
