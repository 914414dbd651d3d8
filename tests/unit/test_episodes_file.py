"""Groups as bytes: what is read is what was written, to the bit."""

import dataclasses
import io

import numpy as np
import pytest

from agent_rl_jax.train import episodes_file
from agent_rl_jax.train.group import Group
from agent_rl_jax.types import (
    Action,
    Episode,
    Row,
    Status,
    Task,
    ToolCall,
    ToolResult,
    Turn,
)

TASK = Task(
    uid='split/7',
    env='tool',
    messages=(
        {'role': 'system', 'content': 'é\ud7ff "quoted"\n\t\\'},
        {'role': 'user', 'content': [6, 7, 8]},
    ),
    payload={'answer': '0.1', 'tests': [1, {'a': None}], 'tolerance': 1e-3},
)


def _row(rng, length):
  mask = rng.random(length) < 0.5
  # Every bit pattern counts, those of a NaN and of a denormal too.
  bits = rng.integers(0, 2**32, length, dtype=np.uint32).view(np.float32)
  return Row(rng.integers(0, 9, length).astype(np.int32), mask, bits)


def _episode(rng, uid, status=Status.DONE):
  turns = (
      Turn(
          row=0,
          action_start=1,
          action_stop=3,
          observation_stop=4,
          action=Action(
              text='<code>\x00 \N{SNOWMAN}',
              tool_calls=(ToolCall('0', 'python', {'code': 'x', 'n': 1.5}),),
          ),
          reward=0.1,
          state_key=b'\x00\xff\n',
          tool_results=(
              ToolResult('0', 'out', True, 0.123456789),
              ToolResult('1', 'gone', False, 2.0, infrastructure=True),
          ),
      ),
      Turn(1, 0, 2, 2, Action('', answer='4', error='bad'), finish='length'),
  )
  return Episode(
      task=TASK,
      uid=uid,
      group=3,
      policy_version=12,
      rows=(_row(rng, 5), _row(rng, 2)),
      turns=turns,
      status=status,
      rewards={'b': 0.1 + 0.2, 'a': 0.0},
      detail='why',
  )


def groups():
  rng = np.random.default_rng(0)
  empty = Episode(
      task=TASK,
      uid=2**40,
      group=0,
      policy_version=0,
      rows=(_row(rng, 0),),
      turns=(),
      status=Status.TIMEOUT,
  )
  return (
      Group(
          (_episode(rng, 0), _episode(rng, 1, Status.MAX_TOKENS)),
          np.array([0.1, np.float32(np.pi)], np.float32),
          np.array([0, 1], np.float32),
          np.array([True, False]),
          baseline=-0.1,
      ),
      Group(
          (empty,), *np.zeros((2, 1), np.float32), np.zeros(1, bool), None
      ),
  )  # fmt: skip


def same(left, right):
  """Equal type, dtype, bits: dataclasses that hold arrays have no ==."""
  assert type(left) is type(right)
  if isinstance(left, np.ndarray):
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.tobytes() == right.tobytes()
  elif dataclasses.is_dataclass(left):
    for field in dataclasses.fields(left):
      same(getattr(left, field.name), getattr(right, field.name))
  elif isinstance(left, (tuple, list)):
    assert len(left) == len(right)
    for pair in zip(left, right, strict=True):
      same(*pair)
  elif isinstance(left, dict):
    assert list(left) == list(right)  # the order of components is kept
    for key in left:
      same(left[key], right[key])
  else:
    assert left == right


def test_every_field_comes_back():
  written = groups()
  same(episodes_file.unpack(episodes_file.pack(written)), written)
  same(episodes_file.unpack(episodes_file.pack(())), ())


def test_equal_groups_give_equal_bytes_and_no_pickle():
  content = episodes_file.pack(groups())
  assert content == episodes_file.pack(groups())
  with np.load(io.BytesIO(content), allow_pickle=False) as loaded:
    assert all(loaded[name].dtype != object for name in loaded.files)


def test_what_would_lose_bits_is_refused():
  group = groups()[0]
  wide = dataclasses.replace(group, returns=group.returns.astype(np.float64))
  with pytest.raises(TypeError, match='safe'):
    episodes_file.pack([wide])
  task = dataclasses.replace(TASK, payload={'answer': {1, 2}})
  episodes = tuple(dataclasses.replace(e, task=task) for e in group.episodes)
  with pytest.raises(TypeError, match='JSON serializable'):
    episodes_file.pack([dataclasses.replace(group, episodes=episodes)])


def test_another_format_is_refused(monkeypatch):
  monkeypatch.setattr(episodes_file, '_FORMAT', 2)
  content = episodes_file.pack(groups())
  monkeypatch.undo()
  with pytest.raises(ValueError, match='format 2; this version reads 1'):
    episodes_file.unpack(content)
