"""Logs: torn lines, truncation on resume, TensorBoard files read back."""

import json
import math
import struct

import numpy as np
import pytest

from agent_rl_jax.train.report import writers


def _steps(path):
  return [record['step'] for record in writers.read_jsonl(path)]


def test_lines_round_trip_exactly(tmp_path):
  writer = writers.JsonlWriter(tmp_path / 'log.jsonl')
  values = {'a/b': 0.1 + 0.2, 'c/d': np.float32(1.5), 'e': float('nan')}
  writer.write(3, values)
  writer.close()
  line = (tmp_path / 'log.jsonl').read_text()
  assert line.count('\n') == 1
  # Strict JSON: a reader in another language must not stumble.
  record = json.loads(line, parse_constant=pytest.fail)
  assert record['step'] == 3 and record['a/b'] == 0.1 + 0.2
  assert record['c/d'] == 1.5 and math.isnan(float(record['e']))


def test_resume_drops_later_lines_and_a_torn_one(tmp_path):
  path = tmp_path / 'log.jsonl'
  writer = writers.JsonlWriter(path)
  for step in range(1, 6):
    writer.write(step, {'x': step})
  writer.close()
  whole = path.read_bytes()
  path.write_bytes(whole + b'{"step": 6, "x"')
  writer = writers.JsonlWriter(path, resume_step=3)
  assert _steps(path) == [1, 2, 3]
  for step in (4, 5):
    writer.write(step, {'x': step})
  writer.close()
  assert path.read_bytes() == whole
  assert [p.name for p in tmp_path.iterdir()] == ['log.jsonl']


@pytest.mark.parametrize('cut', [1, 5, 12])
def test_torn_line_at_any_byte_is_not_read(tmp_path, cut):
  path = tmp_path / 'log.jsonl'
  path.write_bytes((b'{"step": 1}\n' * 2)[:-cut])
  assert _steps(path) == [1]


def test_a_fresh_run_starts_an_empty_log(tmp_path):
  path = tmp_path / 'log.jsonl'
  path.write_text('{"step": 1}\n')
  writers.JsonlWriter(path).close()
  assert path.read_text() == ''


def test_several_lines_of_a_step_are_kept(tmp_path):
  path = tmp_path / 'log.jsonl'
  writer = writers.JsonlWriter(path)
  for step, name in [(1, 'a'), (1, 'b'), (2, 'c')]:
    writer.write(step, {'name': name, 'text': 'x\ud800\n'})
  writer.close()
  writers.JsonlWriter(path, resume_step=1).close()
  assert [r['name'] for r in writers.read_jsonl(path)] == ['a', 'b']


def _events(folder):
  """Reads event files by their format: length, crc, protobuf, crc."""
  from tensorboardX.proto import event_pb2

  for path in sorted(folder.iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (size,) = struct.unpack_from('<Q', data, at)
      event = event_pb2.Event()
      event.ParseFromString(data[at + 12 : at + 12 + size])
      yield event
      at += 12 + size + 4


def test_tensorboard_scalars_can_be_read_back(tmp_path):
  made = writers.make_metric_writers(tmp_path, jsonl=True, tensorboard=True)
  made.write(1, {'reward/total': 0.25, 'note': 'no scalar'})
  made.write(2, {'reward/total': np.float32(0.5)})
  made.close()
  scalars = [
      (event.step, value.tag, value.simple_value)
      for event in _events(tmp_path / 'tensorboard' / 'metrics')
      for value in event.summary.value
  ]
  assert scalars == [(1, 'reward/total', 0.25), (2, 'reward/total', 0.5)]
  assert _steps(tmp_path / 'metrics.jsonl') == [1, 2]


def test_writers_are_optional(tmp_path):
  made = writers.make_metric_writers(tmp_path, jsonl=False, tensorboard=False)
  made.write(1, {'x': 1.0})
  made.close()
  assert list(tmp_path.iterdir()) == []
