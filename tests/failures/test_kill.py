"""SIGKILL anywhere, then the same command: not a bit differs."""

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

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Ten deaths: two in each phase, at odd moments.
DEATHS = (
    'cold_start:3:0.01',
    'save:1:0.0',
    'cold_start:2:0.3',
    'evaluate:1:0.02',
    'rollout:2:0.05',
    'update:6:0.003',
    'save:1:0.03',
    'rollout:3:0.01',
    'evaluate:2:0.0',
    'update:3:0.0',
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


def _arrays(folder):
  step = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
  tree = ocp.PyTreeCheckpointer().restore(folder / str(step) / 'state')
  return step, {name: np.asarray(leaf) for name, leaf in tree.items()}


@pytest.mark.slow
def test_ten_kills_change_no_bit(tmp_path, environment):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  code, out = _finish(_start(environment, whole))
  assert code == 0, out
  for death in DEATHS:
    code, out = _finish(_start(environment, broken, death))
    assert code == -signal.SIGKILL, f'{death}: {out}'
  code, out = _finish(_start(environment, broken))
  assert code == 0, out

  for stage in ('cold_start', 'rl'):
    expected = _arrays(whole / stage / 'checkpoints')
    step, arrays = _arrays(broken / stage / 'checkpoints')
    assert step == expected[0]
    assert arrays.keys() == expected[1].keys()
    for name, array in expected[1].items():
      np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    log = pathlib.Path(stage) / 'metrics.jsonl'
    lines = _lines(whole / log)
    assert len(lines) >= 5
    assert _lines(broken / log) == lines
  # The tool was used, and its random pauses differed.
  assert any(line['episode/tool_calls'] > 0.5 for line in lines)
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
  process = _start(environment, tmp_path / 'run', '', 'hang')
  evaluated = tmp_path / 'run' / 'cold_start' / 'checkpoints' / '5'
  deadline = time.monotonic() + 300
  while not evaluated.exists() and time.monotonic() < deadline:
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.1)
  time.sleep(8)  # into a rollout whose tools all hang
  process.send_signal(signal.SIGINT)
  # The tools hang for an hour: only a run that does not wait ends in time.
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 0, out
  assert 'To go on, run the same command again' in out
