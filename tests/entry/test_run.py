"""The whole run in one process: nothing compiles after warm-up; meshes agree."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from agent_rl_jax.train import arm as arm_lib
from agent_rl_jax.train import pack, parts, run, settings, update
from configs import base
from tests.entry import runner


@pytest.fixture(autouse=True)
def erratic_tools(monkeypatch):
  monkeypatch.setattr(
      parts, 'make_tool', lambda name, **options: runner.ErraticTool()
  )
  monkeypatch.setattr(
      parts,
      'make_chat',
      lambda kind, tokenizer, **options: runner.NoisyChat(tokenizer, **options),
  )


def _run(config):
  return run.run(config, settings.resolve(config, base.get_config()))


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
  assert len(_lines(tmp_path)) == 3
  monkeypatch.setattr(arm_lib.Arm, '_account', account)
  assert _run(config) is not None
  lines = _lines(tmp_path)
  assert [line['step'] for line in lines] == [1, 2, 3, 4, 5, 6]
  assert used == {80, 160}
  assert sum('eval/accuracy' in line for line in lines) == 3
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
