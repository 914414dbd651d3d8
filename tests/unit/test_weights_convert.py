"""`experiments.convert` as a person runs it."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from agent_rl_jax.weights.load import load
from tests.equivalence import parity_weights

pytest.importorskip('safetensors')
ROOT = pathlib.Path(__file__).parents[2]


def _run(*args):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.convert', *args],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
  )


def test_prints_converts_and_says_what_is_wrong(tmp_path):
  source = parity_weights.write_folder(
      tmp_path / 'in', parity_weights.CONFIGS['qwen3'], 5
  )
  (source / 'tokenizer.json').write_text('{}')
  target = tmp_path / 'out'
  done = _run(f'--source={source}', f'--target={target}')
  assert done.returncode == 0, done.stderr
  config, params = load(target)
  want_config, want = load(source)
  assert config == want_config
  np.testing.assert_array_equal(
      params['blocks']['q_norm']['scale'], want['blocks']['q_norm']['scale']
  )
  assert (target / 'tokenizer.json').exists()
  again = _run(f'--source={source}', f'--target={target}')
  assert again.returncode == 1
  assert 'exists already' in again.stderr
  assert 'Traceback' not in again.stderr
  printed = _run(f'--source={source}')
  assert 'config.model.qk_norm = True' in printed.stdout
