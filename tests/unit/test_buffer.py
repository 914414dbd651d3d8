"""The replay buffer: who is drawn, who is admitted, who must leave."""

import dataclasses

import numpy as np

from agent_rl_jax.train import buffer
from agent_rl_jax.train.group import Group
from agent_rl_jax.train.options import ReplayOptions
from agent_rl_jax.types import Episode, Status, Task
from tests.unit.test_episodes_file import groups, same

OPTIONS = ReplayOptions(capacity=4, share=0.5, max_age=3, admit='kept')


def _group(name, version, metric=(0, 1), valid=(True, True)):
  episodes = tuple(
      Episode(Task(name, 'toy', ()), i, 0, version, (), (), Status.DONE)
      for i in range(len(metric))
  )
  metric = np.array(metric, np.float32)
  return Group(episodes, metric, metric, np.array(valid))


def _names(kept):
  return [group.episodes[0].task.uid for group in kept]


REPLAY = tuple(_group(f'g{i}', i) for i in range(6))


def test_draws_are_named_distinct_and_of_age():
  draw = lambda iteration, most=2, seed=0: _names(
      buffer.draw(REPLAY, most, OPTIONS, iteration, seed)
  )
  assert draw(6) == draw(6)
  drawn = [draw(6, seed=seed) for seed in range(40)]
  assert len({tuple(names) for names in drawn}) == 3  # pairs of g3, g4, g5
  assert all(names == sorted(set(names)) for names in drawn)
  assert draw(6, most=9) == ['g3', 'g4', 'g5']
  assert draw(8, most=9) == ['g5']
  assert draw(9) == [] and draw(6, most=0) == []


def test_the_oldest_make_room_and_the_too_old_leave():
  admit = lambda trained, iteration, **changes: _names(
      buffer.admit(
          REPLAY[3:],
          trained,
          dataclasses.replace(OPTIONS, **changes),
          iteration,
      )
  )
  new = [_group('a', 6), _group('b', 6)]
  # At iteration 7 a group of version 3 would be 4 old.
  assert admit(new, 6) == ['g4', 'g5', 'a', 'b']
  assert admit(new, 6, capacity=3) == ['g5', 'a', 'b']
  assert admit([], 7) == ['g5']
  assert admit(new, 6, capacity=0) == []


def test_mixed_admits_what_can_still_teach():
  options = dataclasses.replace(OPTIONS, admit='mixed')
  trained = [
      _group('right', 0, (1, 1)),
      _group('mixed', 0, (1, 0)),
      _group('the other failed', 0, (1, 0), (True, False)),
  ]
  assert _names(buffer.admit((), trained, options, 0)) == ['mixed']
  # As dynamic sampling has it: judges' noise is no difference.
  assert not _group('noise', 0, (0.5, 0.5 + 1e-7)).mixed


def test_a_group_that_nobody_judged_is_not_admitted():
  trained = [_group('dead', 0, valid=(False, False)), _group('alive', 0)]
  for admit in ('kept', 'mixed'):
    options = dataclasses.replace(OPTIONS, admit=admit)
    assert _names(buffer.admit((), trained, options, 0)) == ['alive']


def test_the_share_is_rounded_down_in_decimals_and_never_all():
  groups = lambda share, prompts: dataclasses.replace(
      OPTIONS, share=share
  ).groups(prompts)
  assert groups(0.29, 100) == 29  # 28.999... in binary
  assert groups(0.34, 16) == 5
  assert groups(1 - 1e-12, 4) == 3


def test_both_stores_come_back_from_their_files():
  kept = buffer.Kept(surplus=groups(), replay=groups()[:1])
  files = kept.files()
  assert set(files) == {'surplus.npz', 'replay.npz'}
  same(buffer.Kept.from_files(files), kept)
  # Nothing kept is no file: checkpoints without replay are as they were.
  assert buffer.Kept().files() == {}
  same(buffer.Kept.from_files({}), buffer.Kept())
