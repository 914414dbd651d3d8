"""Rows of a rollout, worked by hand: edits, forks, prefill, truncation."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.models import policy
from agent_rl_jax.rollout import decode, slots
from agent_rl_jax.rollout.admission import Admission
from agent_rl_jax.rollout.slots import Purpose, SlotStatus
from agent_rl_jax.types import Observation
from tests import toys

CONFIG = dataclasses.replace(
    toys.CONFIG, num_layers=1, width=8, num_heads=2, num_kv_heads=1, mlp_width=8
)
SEED = 5


def _slots():
  """Three rows of eight: one free, one that stopped, one that decodes."""
  made = slots.init(CONFIG, 3, 8)
  layer = {
      name: jnp.arange(made.cache[0][name].size, dtype=jnp.float32).reshape(
          made.cache[0][name].shape
      )
      for name in ('k', 'v')
  }
  return made.replace(
      tokens=jnp.asarray(
          [[0] * 8, [11, 12, 13, 14, 15, 0, 0, 0], [11, 12, 23, 24, 0, 0, 0, 0]]
      ),
      length=jnp.asarray([0, 5, 4]),
      cached=jnp.asarray([0, 4, 3]),
      budget=jnp.asarray([0, 1, 7]),
      status=jnp.asarray([SlotStatus.FREE, SlotStatus.STOPPED, 1]),
      match=jnp.asarray([0, 1, 1]),
      key=jnp.asarray([[0, 0], [3, 4], [5, 6]], jnp.uint32),
      temperature=jnp.asarray([1.0, 0.5, 0.25]),
      cache=[layer],
  )


def _edit(row, tokens, start, fresh=False, status=SlotStatus.RUNNING):
  change = slots.empty_edit(3, 4)
  change.touch[row], change.fresh[row] = True, fresh
  change.start[row], change.count[row] = start, len(tokens)
  change.tokens[row, : len(tokens)] = tokens
  change.status[row], change.budget[row] = status, 6
  change.name[row] = (Purpose.EVAL, 1234, 0)
  change.temperature[row] = 0.75
  return slots.edit(_slots(), change, SEED)


def _values(made, row):
  names = ('length', 'cached', 'budget', 'status', 'match', 'temperature')
  return {name: getattr(made, name)[row].item() for name in names}


def _assert_untouched(made, rows):
  pairs = zip(jax.tree.leaves(made), jax.tree.leaves(_slots()), strict=True)
  for after, before in pairs:
    np.testing.assert_array_equal(after[np.array(rows)], before[np.array(rows)])


def test_admitting_fills_a_row_and_names_its_randomness():
  made = _edit(0, [31, 32, 33], start=0, fresh=True)
  assert made.tokens[0].tolist() == [31, 32, 33, 0, 0, 0, 0, 0]
  assert _values(made, 0) == {
      'length': 3,
      'cached': 0,
      'budget': 6,
      'status': SlotStatus.RUNNING,
      'match': 0,
      'temperature': 0.75,
  }
  key = jax.random.key(SEED)
  for part in (Purpose.EVAL, 1234, 0):
    key = jax.random.fold_in(key, part)
  np.testing.assert_array_equal(made.key[0], jax.random.key_data(key))
  _assert_untouched(made, [1, 2])


def test_admitting_over_an_old_row_keeps_nothing_cached():
  made = _edit(1, [31, 32, 33], start=0, fresh=True)
  assert made.cached[1] == 0 and made.length[1] == 3
  assert made.tokens[1, :3].tolist() == [31, 32, 33]


def test_appending_keeps_the_cache_the_key_and_the_temperature():
  made = _edit(1, [41, 42], start=5)
  assert made.tokens[1].tolist() == [11, 12, 13, 14, 15, 41, 42, 0]
  assert _values(made, 1) == {
      'length': 7,
      'cached': 4,  # the sampled last token is still to be fed
      'budget': 6,
      'status': SlotStatus.RUNNING,
      'match': 0,
      'temperature': 0.5,
  }
  assert made.key[1].tolist() == [3, 4]
  _assert_untouched(made, [0, 2])


def test_truncating_forgets_what_was_cached_behind_the_cut():
  made = _edit(1, [51], start=2)
  assert made.tokens[1, :3].tolist() == [11, 12, 51]
  assert (made.length[1], made.cached[1]) == (3, 2)
  # With nothing written the last token is fed again: it has to be sampled on.
  made = _edit(1, [], start=2)
  assert (made.length[1], made.cached[1]) == (2, 1)
  assert made.key[1].tolist() == [3, 4]
  _assert_untouched(made, [0, 2])


def test_releasing_parks_a_row():
  made = _edit(2, [], start=0, status=SlotStatus.FREE)
  assert (made.length[2], made.cached[2]) == (0, 0)
  assert made.status[2] == SlotStatus.FREE
  _assert_untouched(made, [0, 1])


def test_an_empty_edit_changes_nothing():
  made = slots.edit(_slots(), slots.empty_edit(3, 4), SEED)
  _assert_untouched(made, [0, 1, 2])


def test_forking_copies_the_cache_up_to_the_last_token():
  made = _edit(0, [11, 12], start=0, fresh=True)
  sources, targets = jnp.asarray([1, -1]), jnp.asarray([0, -1])
  made = decode.fork(made, sources, targets, toys.partition())
  before = _slots().cache[0]
  for name in ('k', 'v'):
    np.testing.assert_array_equal(made.cache[0][name][0], before[name][1])
  assert made.cached.tolist() == [1, 4, 3]  # min(4, 2 - 1)
  # A source that has less than the target needs gives what it has.
  made = _edit(0, [11, 12, 23, 24], start=0, fresh=True)
  made = made.replace(cached=made.cached.at[2].set(2))
  made = decode.fork(made, jnp.asarray([2]), jnp.asarray([0]), toys.partition())
  assert made.cached.tolist() == [2, 4, 2]


def test_extending_fills_the_cache_block_by_block():
  params = policy.unstack(policy.init(CONFIG, jax.random.key(0)))
  part = toys.partition()
  made = _slots()
  tokens = jnp.arange(24).reshape(3, 8)
  made = made.replace(
      tokens=tokens,
      length=jnp.asarray([8, 5, 4]),
      cached=jnp.asarray([0, 0, 0]),
  )

  @functools.partial(jax.jit, static_argnums=2)
  def extend(made, rows, block):
    return decode.extend(CONFIG, params, made, rows, block, part)

  seen = []
  for rows in ([0, 1], [0, 1], [0, -1]):
    made = extend(made, jnp.asarray(rows), 3)
    seen.append(made.cached.tolist())
  # Never the last token, never over the row's end, never an idle row.
  assert seen == [[3, 3, 0], [6, 4, 0], [7, 4, 0]]
  for name in ('k', 'v'):
    np.testing.assert_array_equal(
        made.cache[0][name][2], _slots().cache[0][name][2]
    )
  fresh = made.replace(cached=jnp.zeros(3, jnp.int32))
  whole = extend(fresh, jnp.asarray([0, 1]), 8)
  assert whole.cached.tolist() == [7, 4, 0]
  for row, count in ((0, 7), (1, 4)):
    for name in ('k', 'v'):
      np.testing.assert_allclose(
          made.cache[0][name][row, :, :count],
          whole.cache[0][name][row, :, :count],
          atol=1e-5,
      )


def _play(programs, params, state, written):
  """Writes (row, tokens, start) greedily, prefills and decodes a chunk."""
  change = slots.empty_edit(toys.OPTIONS.slots, programs.widths[-1])
  for row, tokens, start, fresh in written:
    change.touch[row], change.fresh[row] = True, fresh
    change.start[row], change.count[row] = start, len(tokens)
    change.tokens[row, : len(tokens)] = tokens
    change.status[row], change.budget[row] = SlotStatus.RUNNING, 30
  state = programs.edit(state, change)
  rows = [row for row, *_ in written] + [-1]
  for _ in range(3):
    state = programs.extend(params, state, rows[:2])
  return programs.decode(params, state)


def test_a_truncated_row_decodes_as_one_that_never_was_longer():
  engine, params = toys.engine()
  programs = engine._programs
  first, second = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [30, 31, 32]
  state, report = _play(
      programs, params, programs.init(), [(0, first, 0, True)]
  )
  assert report.count[0] > 0  # what was sampled is cut off too
  state, report = _play(
      programs,
      params,
      state,
      [(0, second, 6, False), (1, first[:6] + second, 0, True)],
  )
  count = int(report.count[0])
  assert count > 0 and report.count[1] == count
  assert report.tokens[0].tolist() == report.tokens[1].tolist()
  assert state.tokens[0, : 9 + count].tolist() == (
      first[:6] + second + report.tokens[0, :count].tolist()
  )
  np.testing.assert_allclose(report.logprobs[0], report.logprobs[1], atol=1e-5)


def test_a_group_s_prompt_is_prefilled_once(monkeypatch):
  admitted = []
  inner = Admission.admit

  def admit(self, live):
    place = inner(self, live)
    if place is not None:
      admitted.append(place)
    return place

  monkeypatch.setattr(Admission, 'admit', admit)

  class Brief(toys.ToyEnv):
    """Ends at the first action, once every member has its slot."""

    def step(self, state, action):
      deadline = time.monotonic() + 20
      while len(admitted) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
      return state, Observation(done=True)

  engine, params = toys.engine(env=Brief())
  requests = toys.requests(count=4, samples=4)[12:]
  requests = [dataclasses.replace(r, group=0) for r in requests]
  tokens = len(requests[0].task.messages[0]['content']) - 1
  rounds = -(-tokens // toys.OPTIONS.extend_block)
  episodes, stats = engine.rollout(params, requests, purpose=Purpose.TRAIN)
  assert len({e.rows[0].tokens[:tokens].tobytes() for e in episodes}) == 1
  assert [source is None for _, source in admitted] == [True] + [False] * 3
  assert rounds >= 1 and stats.prefills == rounds
