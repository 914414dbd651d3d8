"""The echo-trap watch on hand-made series: once when due, else silent."""

import json

import pytest

from agent_rl_jax.train import watch as watch_lib
from agent_rl_jax.train.watch import Watch, WatchOptions

# Three steps make a base, two make a sign, three stop.
OPTIONS = dict(base_steps=3, warn_steps=2, spike_window=3, stop_steps=3)


def _step(**changed):
  """Metrics of a healthy step."""
  metrics = {
      'collect/return_std': 0.4,
      'policy/entropy': 1.0,
      'train/grad_norm': 0.1,
      'episode/repetition': 0.1,
      'episode/input_dependence': 0.8,
      'episode/accuracy': 0.5,
      'collect/kept_fraction': 1.0,
  }
  names = {name.partition('/')[2]: name for name in metrics}
  return metrics | {names[key]: value for key, value in changed.items()}


def _told(series, **options):
  """(step, first words) of every line, and the watch at the end."""
  watch = Watch(WatchOptions(**OPTIONS | options))
  told = [
      (i, line)
      for i, metrics in enumerate(series)
      for line in watch.step(metrics)
  ]
  return told, watch


def test_a_healthy_series_is_silent():
  noise = [0.9, 1.1, 1.0, 1.3, 0.7, 1.2, 0.8] * 4
  told, watch = _told(
      _step(return_std=0.4 * x, grad_norm=0.1 * x, entropy=x) for x in noise
  )
  assert not told and watch.reason is None and watch.told == ()


def test_a_run_that_solves_its_task_is_silent():
  """Less spread, entropy and variety are what success looks like."""
  series = [
      _step(
          accuracy=min(1.0, 0.3 + 0.1 * i),
          return_std=max(0.05, 0.4 - 0.05 * i),
          entropy=1.0 * 0.6**i,
          input_dependence=max(0.1, 0.8 - 0.06 * i),
      )
      for i in range(20)
  ]
  told, _ = _told(series)
  assert not told


SIGNS = [
    ('return_std', 0.07, 'in-group reward std fell to 0.07, below 0.2 of the'),
    ('entropy', 0.04, 'entropy fell to 0.04 nats, below 0.05 of the 1 '),
    ('repetition', 0.31, 'responses repeat themselves: 0.31 of their n-grams'),
    ('input_dependence', 0.39, 'the first turn depends less on the task'),
]


@pytest.mark.parametrize('name, value, words', SIGNS)
def test_a_sign_is_told_once_after_it_has_lasted(name, value, words):
  bad = _step(**{name: value})
  series = [_step()] * 3 + [bad] + [_step()] + [bad] * 2
  told, watch = _told(series, stop_steps=99)
  assert [i for i, _ in told] == [6]
  assert words in told[0][1] and 'at an accuracy of 0.50' in told[0][1]
  assert len(watch.told) == 1
  # It is not told again while it lasts, nor after one good step.
  for metrics in [bad] * 5 + [_step()] + [bad] * 5:
    assert watch.step(metrics) == []
  # It is told again once it has been gone.
  again = [watch.step(m) for m in [_step()] * 2 + [bad] * 2]
  assert [len(lines) for lines in again] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    'name, value', [(name, value) for name, value, _ in SIGNS]
)
def test_just_inside_the_threshold_is_silent(name, value):
  edge = {
      'return_std': 0.081,
      'entropy': 0.051,
      'repetition': 0.299,
      'input_dependence': 0.401,
  }[name]
  told, _ = _told([_step()] * 3 + [_step(**{name: edge})] * 9, stop_steps=99)
  assert not told


def test_the_spread_is_that_of_all_groups_played_and_not_of_the_batch():
  played = lambda std, batch=0.4: _step(return_std=std) | {
      'group/return_std': batch
  }
  assert not _told([played(0.1)] * 3 + [played(0.1, 0.0)] * 9)[0]
  # The batch that a filter left looks as lively as ever.
  told, watch = _told([played(0.1)] * 3 + [played(0.005)] * 3)
  assert [line for _, line in told if 'std fell to 0.005, below' in line]
  assert 'std was below 0.1' in watch.reason


def test_nothing_is_told_before_there_is_a_base():
  assert not _told([_step(return_std=0.4), _step(return_std=0.0)])[0]


def test_a_spike_is_told_at_once_and_does_not_move_its_own_median():
  series = [_step()] * 4 + [_step(grad_norm=1.01)] * 2 + [_step()]
  told, _ = _told(series)
  assert [i for i, _ in told] == [4]
  assert 'spiked to 1.01, the median before is 0.1' in told[0][1]
  # A step without a gradient is no norm to compare with.
  assert not _told([_step(grad_norm=0.0)] * 9 + [_step(grad_norm=9.0)])[0]


def test_a_gradient_that_is_not_finite_is_a_spike():
  """Skipped for that reason, at once; not where a filter left nothing."""
  skip = _step(grad_norm=0.0) | {'train/skipped': 1.0}
  assert not _told([_step()] * 3 + [skip | {'train/nonfinite': 0.0}] * 9)[0]
  some = _step() | {'train/nonfinite': 0.25}
  told, watch = _told([_step()] + [some] * 2 + [_step()] * 4)
  assert [i for i, _ in told] == [1]
  assert 'not finite in 0.25 of the' in told[0][1]
  # Its norm, of the other updates, does not count twice; a spike still does.
  assert watch.told == () and watch.step(_step(grad_norm=9.0))


def test_a_start_without_any_signal_is_told():
  told, watch = _told([_step(return_std=0.0, accuracy=0.0)] * 9)
  assert [i for i, _ in told] == [3]
  # Penalties for length may differ, and then there is an advantage.
  assert 'ever had two different raw returns (penalties for' in told[0][1]
  assert 'no advantage' not in told[0][1]
  # A base of nothing cannot be fallen below.
  assert watch.reason is None


def test_metrics_that_are_absent_or_not_finite_say_nothing():
  told, watch = _told(
      [_step()] * 3 + [{}] * 9 + [_step(return_std=float('nan'))] * 9
  )
  assert not told and watch.reason is None


@pytest.mark.parametrize('stop', [False, True])
def test_stop_rule_of_ragen_2(stop):
  low, edge = _step(return_std=0.039), _step(return_std=0.041)
  series = [_step()] * 3 + [low] * 2 + [edge] + [low] * 3
  told, watch = _told(series, stop=stop, warn_steps=50)
  assert [i for i, _ in told] == [8]
  assert "below 0.1 of its first 3 steps' 0.4 for 3 steps" in told[0][1]
  assert ('the run ends here' in told[0][1]) == stop
  assert watch.stop == stop and watch.reason is not None
  # The verdict is told once.
  assert watch.step(low) == []


def test_empty_filters_in_a_row_stop():
  empty = _step(kept_fraction=0.0)
  series = [empty] * 4 + [_step()] + [empty] * 5
  told, watch = _told(series, stop=True)
  assert [i for i, _ in told] == [9]
  assert 'kept no group for 5 steps' in told[0][1] and watch.stop


def test_failing_validations_in_a_row_stop():
  watch = Watch(WatchOptions(stop=True))
  for step, success in enumerate([0.0, 0.009, 0.01, 0.0, 0.0, 0.0, 0.0]):
    assert watch.validation(step, success) == [] and not watch.stop
  # A resumed run may hand in the last one again.
  saved = watch.state()
  watch = Watch(WatchOptions(stop=True))
  watch.restore(saved)
  assert watch.validation(6, 0.0) == [] and not watch.stop
  (line,) = watch.validation(7, 0.0)
  assert '5 validations in a row had an accuracy below 0.01' in line
  assert watch.stop


def _everything():
  """A series that makes every sign and both kinds of silence."""
  collapse = _step(
      return_std=0.02, entropy=0.01, repetition=0.9, input_dependence=0.1
  )
  return (
      [_step(return_std=0.3 + 0.1 / 3 * i) for i in range(5)]
      + [_step(grad_norm=2.0)]
      + [collapse] * 2
      + [_step()] * 2
      + [collapse | {'episode/accuracy': 0.1 * i} for i in range(4)]
      + [_step(kept_fraction=0.0)] * 6
  )


@pytest.mark.parametrize('cut', range(1, 20))
def test_a_resumed_watch_says_what_a_whole_one_says(cut):
  series = _everything()
  assert len(series) == 20
  whole = Watch(WatchOptions(**OPTIONS))
  expected = [whole.step(metrics) for metrics in series]
  assert sum(map(len, expected)) >= 10
  first = Watch(WatchOptions(**OPTIONS))
  said = [first.step(metrics) for metrics in series[:cut]]
  saved = json.loads(json.dumps(first.state()))
  second = Watch(WatchOptions(**OPTIONS))
  second.restore(saved)
  said += [second.step(metrics) for metrics in series[cut:]]
  assert said == expected
  assert second.state() == whole.state()
  assert second.reason == whole.reason


def test_a_state_saved_under_the_spread_s_earlier_name_is_read():
  first = Watch(WatchOptions(**OPTIONS))
  for metrics in [_step()] * 3:
    first.step(metrics)
  saved = first.state()
  saved['first']['group/return_std'] = saved['first'].pop('collect/return_std')
  second = Watch(WatchOptions(**OPTIONS))
  second.restore(saved)
  assert second.state() == first.state()
  for metrics in [_step(return_std=0.0)] * 3:
    second.step(metrics)
  assert 'std was below 0.1 of its first' in second.reason


def test_saved_state_is_a_copy():
  watch = Watch(WatchOptions(**OPTIONS))
  watch.step(_step())
  state = watch.state()
  before = json.dumps(state)
  for metrics in _everything():
    watch.step(metrics)
  assert json.dumps(state) == before


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'base_steps': 0}, 'watch.base_steps=0 must be at least 1'),
        ({'stop_fraction': -0.1}, 'watch.stop_fraction=-0.1 cannot be below'),
        ({'spike_factor': 1.0}, 'watch.spike_factor=1.0 must be above 1'),
        ({'solved': float('nan')}, 'watch.solved=nan cannot be below'),
    ],
)
def test_options_name_the_value(changes, message):
  with pytest.raises(ValueError, match=message):
    WatchOptions(**changes)


def test_defaults_are_those_of_ragen_2():
  options = watch_lib.WatchOptions()
  assert not options.stop
  assert (options.base_steps, options.stop_steps) == (10, 10)
  assert (options.stop_fraction, options.stop_success) == (0.1, 0.01)
  assert (options.stop_empty, options.stop_validations) == (5, 5)
