"""The stream of tasks: order, epochs, cursor, bad records, options."""

import json

import pytest

from agent_rl_jax import types
from agent_rl_jax.data import records, tasks


class _Source:
  """Tasks 0..size-1, of which some raise RecordError."""

  name = 'numbers'

  def __init__(self, size, bad=(), fingerprint='numbers/1'):
    self.size, self.bad, self.fingerprint = size, set(bad), fingerprint

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    if index in self.bad:
      raise records.RecordError(f'record {index} is bad')
    return types.Task(str(index), 'tool', ())


def _uids(items):
  return [int(item.uid) for item in items]


def test_every_epoch_is_a_permutation_and_epochs_differ():
  stream = tasks.TaskStream(_Source(50), seed=0)
  epochs = [_uids(stream.take(50)) for _ in range(4)]
  assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4
  assert (stream.cursor, stream.epoch) == (200, 4)


def test_seeds_share_no_epoch():
  # grain's own epoch seeds are seed + epoch: seeds 0 and 1 would overlap.
  orders = {
      tuple(_uids(stream.take(50)))
      for seed in (0, 1, 2)
      for stream in [tasks.TaskStream(_Source(50), seed=seed)]
      for _ in range(3)
  }
  assert len(orders) == 9


def test_order_is_pinned():
  # A resumed run of a newer version must go on with the same tasks.
  stream = tasks.TaskStream(_Source(10), seed=0)
  assert _uids(stream.take(12)) == [9, 6, 2, 8, 5, 4, 3, 0, 7, 1, 6, 3]


def test_without_shuffle_the_order_is_the_source_s():
  stream = tasks.TaskStream(_Source(4), seed=0, shuffle=False, start=2)
  assert _uids(stream.take(6)) == [2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize('bad', [(), (3, 4, 17)])
def test_a_restored_stream_goes_on_exactly(bad):
  whole = tasks.TaskStream(_Source(20, bad), seed=7)
  expected = _uids(whole.take(90))
  for cut in (0, 1, 8, 33):
    first = tasks.TaskStream(_Source(20, bad), seed=7)
    head = _uids(first.take(cut))
    state = json.loads(json.dumps(first.state()))
    second = tasks.TaskStream(_Source(20, bad), seed=7)
    second.restore(state)
    assert head + _uids(second.take(90 - cut)) == expected
    assert second.state() == whole.state()


def test_bad_records_are_positions_of_their_own(caplog):
  stream = tasks.TaskStream(_Source(6, bad=[2]), seed=0, shuffle=False)
  assert _uids(stream.take(3)) == [0, 1, 3]
  assert (stream.cursor, stream.skipped) == (4, 1)
  assert 'record 2 is bad' in caplog.text
  assert stream.at(4).uid == '4'
  with pytest.raises(records.RecordError, match='record 2'):
    stream.at(2)


def test_bad_records_are_fatal_when_asked_or_when_there_is_nothing_else():
  stream = tasks.TaskStream(
      _Source(6, bad=[2]), seed=0, shuffle=False, on_error='raise'
  )
  with pytest.raises(records.RecordError, match='record 2 is bad'):
    stream.take(3)
  stream = tasks.TaskStream(_Source(3, bad=range(3)), seed=0)
  with pytest.raises(records.RecordError, match='no record .* gives a task'):
    stream.take(1)


@pytest.mark.parametrize(
    ('other', 'words'),
    [
        (dict(source=_Source(21)), 'length: saved 20, now 21'),
        (dict(source=_Source(20, (), 'numbers/2')), "saved 'numbers/1'"),
        (dict(seed=8), 'seed: saved 7, now 8'),
        (dict(shuffle=False), 'shuffle: saved True, now False'),
    ],
)
def test_restoring_into_other_data_is_refused(other, words):
  state = tasks.TaskStream(_Source(20), seed=7).state()
  options = {'source': _Source(20), 'seed': 7, **other}
  stream = tasks.TaskStream(options.pop('source'), **options)
  with pytest.raises(ValueError, match=words):
    stream.restore(state)


def test_empty_and_oversized_sources_and_bad_options():
  with pytest.raises(ValueError, match="'numbers' is empty"):
    tasks.TaskStream(_Source(0), seed=0)
  with pytest.raises(ValueError, match='has 4294967296 tasks, more than'):
    tasks.TaskStream(_Source(2**32), seed=0)
  with pytest.raises(ValueError, match='start=-1'):
    tasks.TaskStream(_Source(1), seed=0, start=-1)
  with pytest.raises(ValueError, match="kind='csv' is not one of"):
    tasks.make_source('csv')


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(kind='csv'), "kind='csv'"),
        (dict(path='x.jsonl'), "path='x.jsonl' is set, but"),
        (dict(split='test'), "split='test' is not one of"),
        (dict(kind='jsonl'), 'needs path'),
        (dict(kind='jsonl', path='x', size=3), 'size=3 is set, but'),
        (dict(kind='jsonl', path='x', parser='gsm'), "parser='gsm'"),
        (dict(kind='tfds'), 'needs one of'),
        (dict(kind='tfds', path='x', dataset='y'), 'needs one of'),
        (dict(kind='tfds', path='x', data_dir='y'), 'needs dataset'),
        (dict(on_error='ignore'), "on_error='ignore'"),
    ],
)
def test_options_name_the_value_and_the_fix(options, words):
  with pytest.raises(ValueError, match=words):
    tasks.DataOptions(**options)


def test_streams_of_word_problems():
  options = tasks.DataOptions(size=24, system='Be brief.', env='other')
  stream = tasks.make_stream(options, seed=5)
  items = stream.take(24)
  assert {item.payload['template'] for item in items} == set(range(12))
  assert all(item.env == 'other' for item in items)
  assert items[0].messages[0] == {'role': 'system', 'content': 'Be brief.'}
  heldout = tasks.DataOptions(size=24, split='heldout')
  assert tasks.make_stream(heldout, seed=5).take(1) != items[:1]
