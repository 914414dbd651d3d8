"""Host metrics against hand-worked numbers; compiles and memory for real."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax import types
from agent_rl_jax.batch import Mean
from agent_rl_jax.train import metrics


def _episode(uid, group, status, actions, results=(), rewards=None, bad=()):
  """An episode of one row; `actions` are the action tokens of each turn."""
  mask = np.concatenate(
      [[False] * 2] + [[True] * n + [False] for n in actions]
  ).astype(bool)
  row = types.Row(
      np.zeros(len(mask), np.int32), mask, np.zeros(len(mask), np.float32)
  )
  turns = tuple(
      types.Turn(
          row=0,
          action_start=0,
          action_stop=n,
          observation_stop=n,
          action=types.Action('x', error='bad' if k in bad else None),
          tool_results=tuple(results[k]) if k < len(results) else (),
      )
      for k, n in enumerate(actions)
  )
  return types.Episode(
      task=types.Task(f't{group}', 'tool', ()),
      uid=uid,
      group=group,
      policy_version=0,
      rows=(row,),
      turns=turns,
      status=status,
      rewards=rewards or {},
  )


def _result(ok, seconds):
  return types.ToolResult('c', 'text', ok, seconds)


def _episodes():
  done, failed = types.Status.DONE, types.Status.TIMEOUT
  return [
      _episode(
          0, 0, done, [3, 2], [[_result(True, 0.1), _result(False, 0.4)]],
          {'answer': 1.0, 'format': 0.5},
      ),
      _episode(1, 0, done, [5], rewards={'answer': 0.0}, bad=(0,)),
      _episode(
          2, 1, types.Status.MAX_TURNS, [1, 1, 1], [[_result(True, 0.1)]],
          {'answer': 0.0},
      ),
      _episode(3, 1, failed, [9], [[_result(False, 7.0)]], {'answer': 9.0}),
  ]  # fmt: skip


def test_episode_metrics_by_hand():
  got = metrics.episode_metrics(
      _episodes(), [1.5, 0.0, 0.0, 9.0], [1.0, 0.0, 0.0, 1.0]
  )
  want = {
      'reward/total': 0.5,
      'reward/answer': 1 / 3,
      'reward/format': 0.5,
      'episode/accuracy': 1 / 3,
      'episode/action_tokens': 13 / 3,
      'episode/turns': 2.0,
      'episode/tool_calls': 1.0,
      'episode/malformed_turns': 1 / 3,
      'episode/repetition': 1 / 6,  # of the five equal tokens alone
      'episode/input_dependence': 1.0,  # several tokens, against one
      'tools/success_rate': 2 / 3,
      'time/tool_latency_mean': 0.2,
      'time/tool_latency_max': 7.0,
      'status/done': 0.5,
      'status/max_turns': 0.25,
      'status/max_tokens': 0.0,
      'status/timeout': 0.25,
      'status/env_error': 0.0,
      'failures/episodes': 1.0,
  }
  assert got == pytest.approx(want)


def _writing(uid, task, *turns):
  """An episode whose turns are these token ids, after two of a prompt."""
  ids = np.array([900, 901, *(t for turn in turns for t in turn)], np.int32)
  stops = np.cumsum([2, *map(len, turns)])
  return types.Episode(
      task=types.Task(task, 'tool', ()),
      uid=uid,
      group=0,
      policy_version=0,
      rows=(types.Row(ids, np.arange(len(ids)) > 1, np.zeros(len(ids))),),
      turns=tuple(
          types.Turn(0, int(a), int(b), int(b), types.Action('x'))
          for a, b in zip(stops, stops[1:], strict=False)
      ),
      status=types.Status.DONE,
  )


@pytest.mark.parametrize(
    'turns, want',
    [
        ([[1, 2, 3]], 0.0),  # too short for any 4-gram
        ([[1, 2, 3, 4, 5, 6]], 0.0),
        ([[7] * 6], 2 / 3),  # three 4-grams, one of them distinct
        ([[1, 2, 1, 2, 1, 2]], 1 / 3),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.5),  # the same turn again
        ([[1, 2], [3, 4], [1, 2], [3, 4]], 0.0),  # none spans two turns
        ([], 0.0),
    ],
)
def test_repetition_by_hand(turns, want):
  assert metrics.repetition(_writing(0, 'a', *turns)) == pytest.approx(want)


def _dependence(*episodes):
  mean = metrics.input_dependence(episodes)
  return mean.total / mean.count


def test_input_dependence_by_hand():
  one, other = [1, 2, 3], [1, 5, 6]
  told_apart = [
      _writing(0, 'a', one, [9]),
      _writing(1, 'a', one, [9]),
      _writing(2, 'b', other, [9]),
      _writing(3, 'b', other, [9]),
  ]
  assert _dependence(*told_apart) == pytest.approx(1.0)
  same = [_writing(i, 'ab'[i // 2], one) for i in range(4)]
  assert _dependence(*same) == pytest.approx(0.0)
  # Episode 3 writes what a's do and is taken for one of them; 0 and 1 find
  # each other; 2 shares as much with its mate as with a's: half a hit.
  mixed = [*told_apart[:3], _writing(3, 'b', one)]
  assert _dependence(*mixed) == pytest.approx(((1 + 1 + 0.5 + 0) / 4 - 0.5) * 2)
  # Order and uid do not matter.
  assert _dependence(*mixed[::-1]) == pytest.approx(_dependence(*mixed))


def test_input_dependence_reads_the_first_turn_up_to_the_limit():
  tail = lambda i, k: _writing(i, 'ab'[k], [1] * 4 + [10 + k], [20 + k])
  episodes = [tail(0, 0), tail(1, 0), tail(2, 1), tail(3, 1)]
  assert _dependence(*episodes) == pytest.approx(1.0)
  mean = metrics.input_dependence(episodes, limit=4)
  assert mean.total / mean.count == pytest.approx(0.0)


def test_input_dependence_needs_two_tasks_and_a_mate():
  assert metrics.input_dependence([]) is None
  alone = [_writing(i, str(i), [i]) for i in range(4)]
  assert metrics.input_dependence(alone) is None
  group = [_writing(i, 'a', [i]) for i in range(4)]
  assert metrics.input_dependence(group) is None
  # An episode without a mate of its own is compared with, but not counted.
  mean = metrics.input_dependence([*group, _writing(9, 'b', [1])])
  assert mean.count == 4
  got = metrics.episode_metrics(alone, [0.0] * 4, [0.0] * 4)
  assert 'episode/input_dependence' not in got


def test_input_dependence_of_noise_is_chance():
  rng = np.random.default_rng(0)
  noise = [
      _writing(i, str(i // 8), rng.integers(0, 20, 12).tolist())
      for i in range(400)
  ]
  assert abs(_dependence(*noise)) < 0.05


def test_episode_sums_add_up_over_parts():
  episodes = _episodes()
  parts = [
      metrics.episode_sums(part, [1.0] * 2, [1.0] * 2)
      for part in (episodes[:2], episodes[2:])
  ]
  both = {
      name: parts[0][name] + parts[1][name]
      for name in parts[0]
      if name in parts[1]
  }
  whole = metrics.finalize(metrics.episode_sums(episodes, [1.0] * 4, [1.0] * 4))
  assert metrics.finalize(both) == pytest.approx(
      {name: whole[name] for name in both}
  )


def test_no_episode_gives_zeros():
  got = metrics.episode_metrics([], [], [])
  assert set(got.values()) == {0.0}


def test_lengths_must_agree():
  with pytest.raises(ValueError, match='equally many'):
    metrics.episode_metrics(_episodes(), [1.0], [1.0])


def test_finalize_divides_once_and_zero_count_is_zero():
  got = metrics.finalize(
      {
          'a': Mean(jnp.float32(3), jnp.float32(2)),
          'b': Mean(jnp.float32(3), jnp.float32(0)),
          'c': Mean(jnp.float32(jnp.nan), jnp.float32(1)),
      }
  )
  assert got['a'] == 1.5 and got['b'] == 0.0 and np.isnan(got['c'])
  assert all(type(value) is float for value in got.values())


def test_compile_counter_counts_new_shapes_only():
  function = jax.jit(lambda x: x * 3 + 1)
  xs = [np.zeros(n, np.float32) for n in (3, 4)]
  function(xs[0]).block_until_ready()
  with metrics.CompileCounter() as counter:
    function(xs[0]).block_until_ready()
    assert counter.count == 0
    function(xs[1]).block_until_ready()
    assert counter.count == 1 and counter.seconds > 0
    thread = threading.Thread(
        target=lambda: jax.jit(lambda x: x * 5)(xs[1]).block_until_ready()
    )
    thread.start()
    thread.join()
    assert counter.count == 2
  jax.jit(lambda x: x - 7)(xs[0]).block_until_ready()
  assert counter.count == 2


def test_stopwatch_adds_up_and_restarts():
  watch = metrics.Stopwatch()
  for _ in range(2):
    with watch.part('rollout'):
      time.sleep(0.01)
  with pytest.raises(RuntimeError), watch.part('update'):
    raise RuntimeError
  taken = watch.take()
  assert taken['time/rollout'] >= 0.02 and 'time/update' in taken
  assert watch.take() == {}


def test_host_memory_sees_an_allocation():
  before = metrics.host_memory()
  block = np.ones(40_000_000, np.uint8)
  after = metrics.host_memory()
  assert block.sum() == 40_000_000
  if 'memory/host_rss_mb' in before:
    grown = after['memory/host_rss_mb'] - before['memory/host_rss_mb']
    assert 30 < grown < 60
  assert after['memory/host_peak_mb'] >= before['memory/host_peak_mb'] > 1
