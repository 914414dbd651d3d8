"""Whole runs that resample and play greedy baselines, in one process."""

import json
import pathlib

import pytest

from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.train import run, settings
from configs import base
from tests.entry import runner


@pytest.fixture(autouse=True)
def erratic_tools(monkeypatch):
  runner.make_erratic(monkeypatch)


def _run(config):
  made = run.run(config, settings.resolve(config, base.get_config()))
  path = pathlib.Path(config.run_dir) / 'rl' / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  return made, [line for line in lines if 'train/loss' in line]


def _tiny(tmp_path):
  config = runner.tiny(tmp_path)
  config.sft.exercise_steps = config.sft.steps = 0
  config.train.iterations = 3
  config.train.pack_len = (160,)
  config.eval.every = 0
  config.eval.final_problems = 2
  return config


def _nothing_in_the_second(task, episodes, step):
  """Every other episode is right, but in the second iteration."""
  del task
  return [float(step != 1 and i % 2) for i in range(len(episodes))]


@pytest.mark.slow
def test_an_iteration_whose_groups_are_all_dropped_updates_nothing(
    tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(REWARDS, 'fickle', lambda: _nothing_in_the_second)
  config = _tiny(tmp_path)
  config.rewards.metric = 'fickle'
  config.filter.name = 'dynamic_sampling'
  config.filter.tries = 2
  config.algorithm.advantage = 'remax'
  config.overlong.penalty = 0.5
  config.overlong.mask = True
  summary, lines = _run(config)
  assert summary is not None and len(lines) == 3
  some = lambda name: [line[name] for line in lines]
  assert some('collect/waves') == [1, 2, 1]
  assert some('collect/missing_groups') == [0, 4, 0]
  assert some('collect/kept_fraction') == [1, 0, 1]
  # All of its updates are skipped, and counted.
  assert some('train/skipped') == [0, 1, 0]
  assert some('train/nonfinite') == [0, 0, 0]
  assert lines[1]['train/loss'] == 0 and lines[2]['train/grad_norm'] > 0
  assert some('episode/greedy_episodes') == [4, 8, 4]
  assert some('compile/after_warm_up') == [0, 0, 0]
  assert '4 of 4 groups are missing' in capsys.readouterr().err


@pytest.mark.slow
def test_a_ranking_filter_spreads_what_is_left_over_the_updates(tmp_path):
  config = _tiny(tmp_path)
  config.filter.name = 'top_share'
  config.filter.value = 0.5
  config.train.iterations = 1
  _, lines = _run(config)
  # Two groups of four are left, one for each of the two mini-batches.
  assert lines[0]['collect/kept_fraction'] == 0.5
  assert lines[0]['train/skipped'] == 0
  # The first of them had ratios of one, the last is the furthest.
  line = lines[0]
  assert line['policy/ratio_max'] == line['last_update/ratio_max'] > 1
  assert line['last_update/approx_kl'] != line['policy/approx_kl']
