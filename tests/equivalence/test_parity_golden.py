"""Logits of a loaded checkpoint against stored ones of transformers."""

import json

import numpy as np
import pytest

from agent_rl_jax.weights.load import load
from tests.equivalence import parity_weights

pytest.importorskip('safetensors')


@pytest.mark.parametrize('family', sorted(parity_weights.CONFIGS))
def test_logits_equal_golden(family, tmp_path):
  path = parity_weights.GOLDEN / f'logits_{family}.json'
  golden = json.loads(path.read_text())
  folder = parity_weights.write_folder(
      tmp_path / family, golden['config'], golden['seed']
  )
  config, params = load(folder)
  ids = np.asarray(golden['tokens'], np.int32)
  ours = parity_weights.our_logits(config, params, ids)
  want = np.asarray(golden['logits'])
  assert np.std(want) > 0.5  # not a model that says nothing
  np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4)
