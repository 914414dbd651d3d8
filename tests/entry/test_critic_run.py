"""A whole run with a critic: warmed up, killed, resumed, read back."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from agent_rl_jax.train import playback, run, settings
from configs import base
from tests.entry import runner


@pytest.fixture(autouse=True)
def erratic_tools(monkeypatch):
  runner.make_erratic(monkeypatch)


def _config(folder):
  config = runner.tiny(folder)
  config.sft.exercise_steps = config.sft.steps = 0
  config.algorithm.advantage = 'gae'
  config.algorithm.lam = 0.9
  config.critic.kind = 'own'
  config.critic.warmup_updates = 2
  config.train.iterations = 2
  config.train.epochs = 1
  config.train.pack_len = (160,)
  config.eval.every = 0
  config.eval.final_problems = 2
  config.checkpoint.every = 1
  return config


def _run(config):
  return run.run(config, settings.resolve(config, base.get_config()))


def _lines(folder):
  path = pathlib.Path(folder) / 'rl' / 'metrics.jsonl'
  exact = lambda key: not key.startswith(('time/', 'memory/', 'compile/'))
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert {line['compile/after_warm_up'] for line in lines} == {0.0}
  return [{k: v for k, v in line.items() if exact(k)} for line in lines]


@pytest.mark.slow
def test_a_killed_critic_goes_on_bit_for_bit(tmp_path):
  config = _config(tmp_path / 'run')
  assert _run(config) is not None
  first, second = whole = _lines(tmp_path / 'run')
  # Two updates of warm-up are the first iteration: the critic moved alone.
  assert first['policy/ratio_max'] == pytest.approx(1, abs=1e-5)
  assert first['value/explained_variance'] == 0
  assert first['value/prediction'] != 0 and first['train/skipped'] == 0
  assert second['policy/ratio_max'] > 1 + 1e-4
  assert second['value/explained_variance'] != 0

  rl = tmp_path / 'run' / 'rl'
  loaded = {}
  for step in (1, 2):
    with playback.load(config.run_dir, base.get_config(), 'rl', step) as play:
      # The critic stays behind: only the policy is published.
      assert set(play.params) == {'embed', 'blocks', 'final_norm'}
      loaded[step] = np.asarray(play.params['embed']['table'])
  assert (loaded[1] != loaded[2]).any()

  # As if killed before the second checkpoint was whole.
  shutil.rmtree(rl / 'checkpoints' / '2')
  (rl / 'final.json').unlink()
  assert _run(config) is not None
  assert _lines(tmp_path / 'run') == whole
