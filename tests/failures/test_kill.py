"""SIGKILL or Ctrl-C anywhere, then the same command: not a bit differs."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp
import pytest

from agent_rl_jax.train.buffer import Kept
from tests.entry import runner
from tests.unit.test_episodes_file import same

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Ten deaths: two in each phase, at odd moments.  Each process goes on from the
# last whole checkpoint; those of the RL stage are at iterations 2, 4 and 6.
DEATHS = (
    'cold_start:3:0.01',
    'save:1:0.0',
    'cold_start:2:0.05',
    'evaluate:1:0.02',
    'rollout:2:0.05',
    'update:14:0.003',  # in the fourth iteration
    'update:3:0.0',  # in the third, from checkpoint 2
    'rollout:5:0.01',  # in the sixth, from checkpoint 2
    'save:1:0.03',  # checkpoint 6, half written, from checkpoint 4
    'evaluate:1:0.0',  # after the sixth, from either
)


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
  # Restarts read compiled programs from a cache: less waiting, same bits.
  cache = tmp_path_factory.mktemp('compiled')
  return {
      **os.environ,
      'JAX_COMPILATION_CACHE_DIR': str(cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
      'XLA_FLAGS': '',
      'PYTHONPATH': str(ROOT),
  }


def _start(environment, *arguments):
  return subprocess.Popen(
      [sys.executable, '-m', 'tests.entry.runner', *map(str, arguments)],
      cwd=ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )


def _finish(process):
  out, _ = process.communicate(timeout=600)
  return process.returncode, out


def _lines(path):
  """Metrics that are neither times nor memory."""
  return [
      {
          name: value
          for name, value in json.loads(line).items()
          if not name.startswith(('time/', 'memory/'))
      }
      for line in path.read_text().splitlines()
  ]


def _iterations(lines):
  """Steps of the lines that are no mere notes on a step (an evaluation)."""
  return [line['step'] for line in lines if 'train/loss' in line]


def _steps(folder):
  if not folder.exists():
    return []
  return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())


def _arrays(folder):
  step = _steps(folder)[-1]
  tree = ocp.PyTreeCheckpointer().restore(folder / str(step) / 'state')
  return step, {name: np.asarray(leaf) for name, leaf in tree.items()}


def _kept(folder):
  """Groups that a checkpoint holds, without how long their tools took."""
  local = folder / 'local' / 'process_0'
  kept = Kept.from_files({p.name: p.read_bytes() for p in local.glob('*.npz')})
  untimed = lambda result: dataclasses.replace(result, seconds=0.0)

  def turn(t):
    return dataclasses.replace(
        t, tool_results=tuple(map(untimed, t.tool_results))
    )

  def episode(e):
    return dataclasses.replace(e, turns=tuple(map(turn, e.turns)))

  def group(g):
    return dataclasses.replace(g, episodes=tuple(map(episode, g.episodes)))

  return Kept(*(tuple(map(group, s)) for s in (kept.surplus, kept.replay)))


def _assert_same(whole, broken, stage):
  """Equal parameters, optimizer, estimator and host state, and metrics."""
  folders = [root / stage / 'checkpoints' for root in (whole, broken)]
  step, expected = _arrays(folders[0])
  found, arrays = _arrays(folders[1])
  assert found == step
  assert arrays.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(array, arrays[name], err_msg=name)
  local = pathlib.Path(str(step), 'local', 'process_0', 'host.json')
  hosts = [
      json.loads((folder / local).read_text())['host_state']
      for folder in folders
  ]
  for host in hosts:
    del host['seconds']
  assert hosts[0] == hosts[1]
  same(*(_kept(folder / str(step)) for folder in folders))
  log = pathlib.Path(stage) / 'metrics.jsonl'
  lines = _lines(whole / log)
  assert _iterations(lines) == list(range(1, step + 1))
  assert _lines(broken / log) == lines
  return lines, arrays, hosts[0]


def _interrupt_when(marker, process):
  """Ctrl-C once the tools hang, which they do for an hour."""
  deadline = time.monotonic() + 300
  while not marker.exists() and time.monotonic() < deadline:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05)
  assert marker.exists()
  process.send_signal(signal.SIGINT)
  # Only a run that does not wait for them ends in time.
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 0, out
  assert 'To go on, run the same command again' in out


@pytest.mark.slow
def test_ten_kills_change_no_bit(tmp_path, environment):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  code, out = _finish(_start(environment, whole))
  assert code == 0, out
  resumed = []
  for death in DEATHS:
    resumed.append(max(_steps(broken / 'rl' / 'checkpoints'), default=0))
    code, out = _finish(_start(environment, broken, f'--die={death}'))
    assert code == -signal.SIGKILL, f'{death}: {out}'
  resumed.append(max(_steps(broken / 'rl' / 'checkpoints'), default=0))
  code, out = _finish(_start(environment, broken))
  assert code == 0, out
  # Some went on from inside the RL stage, with all that it carries.
  assert {2, 4} <= set(resumed), resumed

  _assert_same(whole, broken, 'cold_start')
  lines, arrays, host = _assert_same(whole, broken, 'rl')
  # The tool was used, and its random pauses differed.
  assert any(line.get('episode/tool_calls', 0) > 0.5 for line in lines)
  assert sum('eval/accuracy' in line for line in lines) == 3
  # What is carried was there, and had moved.
  start, end = (
      arrays[f'0/{part}/policy/embed/table'] for part in ('frozen', 'trainable')
  )
  assert (start != end).any()
  assert arrays['1/kl_coef'] != np.float32(0.01)
  assert sum(host['rewards']['novelty'].values()) == 6 * 4
  ends = [
      json.loads((folder / 'rl' / 'final.json').read_text())['metrics']
      for folder in (whole, broken)
  ]
  for end in ends:
    for name in list(end):
      if name.startswith('time/'):
        del end[name]
  assert ends[0] == ends[1]


@pytest.mark.slow
def test_interrupt_with_a_hung_tool_saves_and_exits(tmp_path, environment):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  marker = tmp_path / 'hangs'
  process = _start(environment, broken, '--no_sft', f'--hang={marker}')
  _interrupt_when(marker, process)
  # The last whole iteration was saved, though no checkpoint was due.
  assert runner.HANG_AFTER % 2
  assert _steps(broken / 'rl' / 'checkpoints')[-1] == runner.HANG_AFTER
  log = pathlib.Path('rl') / 'metrics.jsonl'
  assert _iterations(_lines(broken / log)) == [1, 2, 3]

  for folder in (broken, whole):
    code, out = _finish(_start(environment, folder, '--no_sft'))
    assert code == 0, out
  _assert_same(whole, broken, 'rl')


# Two before an interrupt in the fourth iteration, two after it.
COLLECTING_DEATHS = (
    'update:12:0.0',  # in the third iteration: checkpoint 2 is there
    'rollout:3:0.02',  # from it, in a later wave or iteration
    'save:1:0.0',  # from 3, before checkpoint 4 is begun
    'rollout:3:0.01',  # from 3 again
)


@pytest.mark.slow
def test_resampling_and_replay_survive_kills_and_an_interrupt(
    tmp_path, environment
):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  options = ('--no_sft', '--collect')
  code, out = _finish(_start(environment, whole, *options))
  assert code == 0, out
  checkpoints = broken / 'rl' / 'checkpoints'
  resumed = []

  def die(death):
    resumed.append(max(_steps(checkpoints), default=0))
    process = _start(environment, broken, *options, f'--die={death}')
    code, out = _finish(process)
    assert code == -signal.SIGKILL, f'{death}: {out}'

  for death in COLLECTING_DEATHS[:2]:
    die(death)
  marker = tmp_path / 'hangs'
  process = _start(environment, broken, *options, f'--hang={marker}')
  _interrupt_when(marker, process)
  assert _steps(checkpoints)[-1] == runner.HANG_AFTER
  assert _kept(checkpoints / str(runner.HANG_AFTER)).replay
  for death in COLLECTING_DEATHS[2:]:
    die(death)
  assert resumed == [0, 2, 3, 3]
  code, out = _finish(_start(environment, broken, *options))
  assert code == 0, out

  lines, arrays, _ = _assert_same(whole, broken, 'rl')
  lines = [line for line in lines if 'train/loss' in line]
  some = lambda name: [line[name] for line in lines]
  assert max(some('collect/waves')) > 1 and max(some('collect/surplus')) > 0
  assert max(some('replay/share')) == 0.25 and max(some('replay/age')) > 0
  assert arrays['1/baseline/average'] != 0
  # Waves, empty rows and replayed ones have the shapes of the warm-up.
  assert set(some('compile/after_warm_up')) == {0.0}
