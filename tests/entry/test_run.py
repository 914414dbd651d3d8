"""The whole run in one process: nothing compiles after warm-up; meshes agree."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

from agent_rl_jax.train import arm as arm_lib
from agent_rl_jax.train import pack, playback, run, settings, update
from configs import base
from tests.entry import runner


@pytest.fixture(autouse=True)
def erratic_tools(monkeypatch):
  runner.make_erratic(monkeypatch)


def _run(config):
  return run.run(config, settings.resolve(config, base.get_config()))


def _type(lines, prompt):
  del prompt
  if not lines:
    raise EOFError
  return lines.pop()


def _lines(folder, stage='rl'):
  path = pathlib.Path(folder) / stage / 'metrics.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(tmp_path, monkeypatch):
  """Every bucket is visited, evaluations run, the run stops and resumes."""
  config = runner.tiny(tmp_path)
  config.sft.exercise_steps = config.sft.steps = 0
  config.train.pack_len = (80, 160)
  used = set()
  inner = pack.bin_length

  def spy(lengths, buckets):
    size = inner(lengths, buckets)
    if len(buckets) > 1:
      used.add(size)
    return size

  monkeypatch.setattr(update.pack_lib, 'bin_length', spy)
  account = arm_lib.Arm._account

  def stop_in_the_middle(self, metrics, done):
    account(self, metrics, done)
    if self.stage.step == 2:
      self.trainer.parts.stop.set()

  monkeypatch.setattr(arm_lib.Arm, '_account', stop_in_the_middle)
  assert _run(config) is None  # interrupted
  assert _lines(tmp_path)[-1]['step'] == 3
  monkeypatch.setattr(arm_lib.Arm, '_account', account)
  assert _run(config) is not None
  lines = _lines(tmp_path)
  # An evaluation is a line of its own, after the one of its iteration.
  assert [line['step'] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
  assert [line['step'] for line in lines if 'eval/accuracy' in line] == [
      2, 4, 6
  ]  # fmt: skip
  lines = [line for line in lines if 'eval/accuracy' not in line]
  assert used == {80, 160}
  assert {line['compile/after_warm_up'] for line in lines} == {0.0}


@pytest.mark.slow
def test_a_mesh_of_eight_learns_what_one_device_learns(tmp_path):
  folders = {}
  for name, mesh in (('one', (1, 1, 1)), ('eight', (2, 2, 2))):
    config = runner.tiny(tmp_path / name)
    config.sft.exercise_steps = 1
    config.sft.steps = 0
    config.sft.pack_len = (256,)
    config.train.iterations = 2
    config.train.pack_len = (160,)
    config.train.mini_batches = 1
    config.train.epochs = 1
    config.eval.every = 0
    config.eval.final_problems = 2
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    assert _run(config) is not None
    folders[name] = _lines(tmp_path / name)
  for one, eight in zip(folders['one'], folders['eight'], strict=True):
    for key, value in one.items():
      if not key.startswith(('time/', 'memory/', 'compile/')):
        np.testing.assert_allclose(
            eight[key], value, rtol=2e-3, atol=2e-5, err_msg=key
        )


def test_without_enough_devices_the_run_says_so(tmp_path):
  config = runner.tiny(tmp_path)
  config.mesh.data = 16
  config.train.micro_batch = config.sft.micro_batch = 16
  config.rollout.slots = 16
  resolved = settings.resolve(config, base.get_config())
  with pytest.raises(ValueError, match='needs 16 devices but 8'):
    run.run(config, dataclasses.replace(resolved))


@pytest.mark.slow
def test_a_finished_run_is_read_back_scored_and_played(tmp_path, capsys):
  config = runner.tiny(tmp_path)
  config.sft.exercise_steps, config.sft.steps = 1, 0
  config.sft.pack_len = (256,)
  config.train.iterations = 1
  config.train.pack_len = (160,)
  config.eval.every = 0
  config.eval.final_problems = 4
  config.eval.without_tool = True
  config.sft.warn_below = 100.0
  summary = _run(config)
  # Of the arm with tools only: without them little reward is no news.
  assert capsys.readouterr().err.count('before RL, below') == 1
  assert set(summary['accuracy']) == {'cold start', 'after RL', 'text only'}
  for name in ('config.json', 'summary.json', 'curves.png', 'tokenizer.model'):
    assert (tmp_path / name).stat().st_size > 0
  pages = sorted(p.name for p in (tmp_path / 'rl/trajectories').iterdir())
  assert 'final.html' in pages and 'iteration_000001.html' in pages
  # Running it again trains nothing and finds the same figures.
  again = _run(config)
  assert again['accuracy'] == summary['accuracy']
  capsys.readouterr()

  for stage in ('rl', 'cold_start', 'without_tool'):
    with playback.load(str(tmp_path), base.get_config(), stage) as loaded:
      metrics = playback.score_checkpoint(loaded, problems=4)
      assert 0 <= metrics['episode/accuracy'] <= 1
      lines = ['', 'Tom has 3 apples. How many apples has Tom?']
      playback.play(loaded, read=functools.partial(_type, lines))
  shown = capsys.readouterr().out
  assert shown.count('agent:') >= 6 and '(right:' in shown
  with pytest.raises(FileNotFoundError, match="no stage 'critic'; it has"):
    playback.load(str(tmp_path), base.get_config(), 'critic')
  with pytest.raises(FileNotFoundError, match='is no run folder'):
    playback.load(str(tmp_path / 'rl'), base.get_config(), 'rl')
