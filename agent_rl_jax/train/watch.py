"""Echo-trap watch: says in words what is collapsing, and may end a run.

RAGEN (Wang et al. 2025, arXiv 2504.20073) names the signs: the spread of
rewards inside groups dries up, entropy falls, gradient norms spike, responses
repeat; RAGEN-2 (arXiv 2604.06268) adds that the reasoning stops depending on
the input, and the stop rule.  Reads finished metrics only.  Leaves out how
they are measured (`metrics.py`, `algorithms`) and the ending (`arm.py`).
Invariant: what it says is a function of the metrics of the steps so far; its
state is JSON, so that a resumed run says and stops as a whole one does.

Entropy and spread fall in every run that learns.  The thresholds are set so
that a run which gets better stays silent: a fall counts against the mean of
the run's own first steps, must last, and does not count once the task is
solved.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

# Of the raw returns of all groups that the policy played: a filter or replay
# decides what is in the batch, and penalties for length differ where answers
# are all wrong.
SPREAD = 'collect/return_std'
# The name that states saved before hold it under.
_EARLIER_SPREAD = 'group/return_std'
ENTROPY = 'policy/entropy'
NORM = 'train/grad_norm'
NONFINITE = 'train/nonfinite'
REPETITION = 'episode/repetition'
DEPENDENCE = 'episode/input_dependence'
SUCCESS = 'episode/accuracy'
KEPT = 'collect/kept_fraction'

_BASED = (SPREAD, ENTROPY, REPETITION, DEPENDENCE)

# Below it a spread is no spread, as in `group/zero_variance_fraction`.
_FLAT = 1e-6


@dataclasses.dataclass(frozen=True)
class WatchOptions:
  """When to warn and when to stop.

  Attributes:
    stop: End the RL stage when the stop rule is met; False only says so.
    base_steps: First steps whose mean is the base of a metric.
    warn_steps: Consecutive steps that a sign must last, and be gone before
      it is told again.
    spread_fraction: Warn of in-group reward std below this share of its base.
    entropy_fraction: Warn of entropy below this share of its base.
    repetition_rise: Warn of repetition above its base by more than this.
    dependence_fraction: Warn of input dependence below this share of its base.
    spike_factor: Warn of a gradient norm above so many times the median; one
      that is not finite is above any.
    spike_window: Earlier steps of that median.
    solved: Accuracy from which less spread, entropy and dependence on the
      input are no sign of collapse.
    stop_fraction: Stop rule: in-group reward std below this share of its base
    stop_steps: for so many consecutive steps,
    stop_empty: or so many consecutive steps whose filter kept no group,
    stop_validations: or so many consecutive validations
    stop_success: with an accuracy below this.
  """

  stop: bool = False
  base_steps: int = 10
  warn_steps: int = 3
  spread_fraction: float = 0.2
  entropy_fraction: float = 0.05
  repetition_rise: float = 0.2
  dependence_fraction: float = 0.5
  spike_factor: float = 10.0
  spike_window: int = 20
  solved: float = 0.9
  stop_fraction: float = 0.1
  stop_steps: int = 10
  stop_empty: int = 5
  stop_validations: int = 5
  stop_success: float = 0.01

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool):
        continue
      if isinstance(value, int) and value < 1:
        raise ValueError(f'watch.{field.name}={value} must be at least 1')
      if not value >= 0:
        raise ValueError(f'watch.{field.name}={value} cannot be below 0')
    if self.spike_factor <= 1:
      raise ValueError(
          f'watch.spike_factor={self.spike_factor} must be above 1: every'
          ' second norm is above the median'
      )


class Watch:
  """Reads one step after the other; `reason` says why the run should end."""

  def __init__(self, options: WatchOptions):
    self.options = options
    # The first values of each metric, until its base is known.
    self._first: dict[str, list[float]] = {name: [] for name in _BASED}
    self._norms: list[float] = []
    self._success: list[float] = []
    # Steps in a row in which a sign was there, and was not.
    self._lasted: dict[str, int] = {}
    self._gone: dict[str, int] = {}
    self._told: list[str] = []
    self._validated = -1
    self.reason: str | None = None

  @property
  def stop(self) -> bool:
    """Whether the run should end now."""
    return self.options.stop and self.reason is not None

  @property
  def told(self) -> tuple[str, ...]:
    """Signs that were told of and have not gone since."""
    return tuple(self._told)

  def state(self) -> dict[str, Any]:
    """JSON-able; `restore` goes on from it."""
    return {
        'first': {name: list(v) for name, v in self._first.items()},
        'norms': list(self._norms),
        'success': list(self._success),
        'lasted': dict(self._lasted),
        'gone': dict(self._gone),
        'told': list(self._told),
        'validated': self._validated,
        'reason': self.reason,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes on what `state` gave."""
    self._first = {
        SPREAD if name == _EARLIER_SPREAD else name: list(v)
        for name, v in state['first'].items()
    }
    self._norms = list(state['norms'])
    self._success = list(state['success'])
    self._lasted = dict(state['lasted'])
    self._gone = dict(state['gone'])
    self._told = list(state['told'])
    self._validated = state['validated']
    self.reason = state['reason']

  def step(self, metrics: Mapping[str, float]) -> list[str]:
    """Reads the metrics of an iteration; returns what is to be told.

    A metric that is absent or not finite says nothing.
    """
    options = self.options
    values = {
        name: float(metrics[name])
        for name in (*_BASED, NORM, NONFINITE, SUCCESS, KEPT)
        if name in metrics and math.isfinite(metrics[name])
    }
    if SUCCESS in values:
      self._success = [*self._success, values[SUCCESS]][-options.warn_steps :]
    lines = []
    for check in (
        self._flat,
        self._spread,
        self._entropy,
        self._repetition,
        self._dependence,
        self._spike,
    ):
      found = check(values)
      if found is not None:
        lines += self._sign(check.__name__.lstrip('_'), *found)
    if SPREAD in values and self._known(SPREAD):
      base = self._base(SPREAD)
      self._rule(
          'stop_spread',
          values[SPREAD] < options.stop_fraction * base,
          options.stop_steps,
          f'in-group reward std was below {options.stop_fraction:g} of its'
          f" first {options.base_steps} steps' {base:.3g} for"
          f' {options.stop_steps} steps',
      )
    if KEPT in values:
      self._rule(
          'stop_empty',
          values[KEPT] <= 0,
          options.stop_empty,
          f'the filter kept no group for {options.stop_empty} steps',
      )
    # Last, so that a base never holds the step that is compared with it.
    for name in _BASED:
      if name in values and not self._known(name):
        self._first[name].append(values[name])
    if values.get(NORM, 0.0) > 0:
      self._norms = [*self._norms, values[NORM]][-options.spike_window :]
    return lines + self._verdict()

  def validation(self, step: int, success: float) -> list[str]:
    """Reads the accuracy of the validation after `step`, once.

    A step that was read before is left alone: a resumed run may hand the
    last one in again.
    """
    if step <= self._validated:
      return []
    self._validated = step
    options = self.options
    self._rule(
        'stop_validations',
        success < options.stop_success,
        options.stop_validations,
        f'{options.stop_validations} validations in a row had an accuracy'
        f' below {options.stop_success:g}',
    )
    return self._verdict()

  def _known(self, name: str) -> bool:
    return len(self._first[name]) >= self.options.base_steps

  def _base(self, name: str) -> float:
    return sum(self._first[name]) / len(self._first[name])

  def _solved(self) -> bool:
    recent = self._success
    return bool(recent) and sum(recent) / len(recent) >= self.options.solved

  def _recent(self) -> str:
    if not self._success:
      return ''
    mean = sum(self._success) / len(self._success)
    return f', at an accuracy of {mean:.2f}'

  def _fell(self, values, name: str, fraction: float) -> bool:
    """Whether this step's value lies below `fraction` of its base."""
    return values[name] < fraction * self._base(name) and not self._solved()

  # Each check gives None where it cannot tell, else (there, steps, words).

  def _flat(self, values) -> tuple[bool, int, str] | None:
    if not self._known(SPREAD):
      return None
    return (
        self._base(SPREAD) <= _FLAT and values.get(SPREAD, 1.0) <= _FLAT,
        1,
        'no group has ever had two different raw returns (penalties for length'
        ' left out), so comparing the samples of a task teaches nothing of it:'
        ' the task is too hard or too easy for this start' + self._recent(),
    )

  def _spread(self, values) -> tuple[bool, int, str] | None:
    if SPREAD not in values or not self._known(SPREAD):
      return None
    fraction, steps = self.options.spread_fraction, self.options.warn_steps
    return (
        self._fell(values, SPREAD, fraction),
        steps,
        f'in-group reward std fell to {values[SPREAD]:.3g}, below {fraction:g}'
        f' of the {self._base(SPREAD):.3g} that it began with{self._recent()}:'
        ' the samples of a prompt end alike and there is little left to learn'
        ' from; harder or more varied tasks, a filter on reward std or a lower'
        ' rate may help',
    )

  def _entropy(self, values) -> tuple[bool, int, str] | None:
    if ENTROPY not in values or not self._known(ENTROPY):
      return None
    fraction, steps = self.options.entropy_fraction, self.options.warn_steps
    return (
        self._fell(values, ENTROPY, fraction),
        steps,
        f'entropy fell to {values[ENTROPY]:.3g} nats, below {fraction:g} of'
        f' the {self._base(ENTROPY):.3g} that it began with{self._recent()}:'
        ' the policy no longer explores; a higher clip_high, an entropy bonus'
        ' or a lower rate may help',
    )

  def _repetition(self, values) -> tuple[bool, int, str] | None:
    if REPETITION not in values or not self._known(REPETITION):
      return None
    base, rise = self._base(REPETITION), self.options.repetition_rise
    return (
        values[REPETITION] > base + rise,
        self.options.warn_steps,
        f'responses repeat themselves: {values[REPETITION]:.2f} of their'
        f' n-grams, {base:.2f} at the beginning{self._recent()}',
    )

  def _dependence(self, values) -> tuple[bool, int, str] | None:
    if DEPENDENCE not in values or not self._known(DEPENDENCE):
      return None
    fraction = self.options.dependence_fraction
    return (
        self._fell(values, DEPENDENCE, fraction),
        self.options.warn_steps,
        'the first turn depends less on the task: input dependence fell to'
        f' {values[DEPENDENCE]:.2f}, below {fraction:g} of the'
        f' {self._base(DEPENDENCE):.2f} that it began with{self._recent()}: the'
        ' policy may be reciting a template',
    )

  def _spike(self, values) -> tuple[bool, int, str] | None:
    if values.get(NONFINITE, 0.0) > 0:
      return (
          True,
          1,
          f'the gradient was not finite in {values[NONFINITE]:.2g} of the'
          f" step's updates, which were skipped{self._recent()}; a lower rate,"
          ' tighter clipping or a look at the rewards may help',
      )
    window = min(self.options.spike_window, self.options.base_steps)
    if NORM not in values or len(self._norms) < window:
      return None
    median = statistics.median(self._norms)
    return (
        values[NORM] > self.options.spike_factor * median,
        1,
        f'the gradient norm spiked to {values[NORM]:.3g}, the median before is'
        f' {median:.3g}{self._recent()}; collapse often shows in spikes last',
    )

  def _sign(self, name: str, there: bool, steps: int, words: str) -> list[str]:
    """Tells a sign once it has lasted, and again only after it was gone."""
    self._lasted[name] = self._lasted.get(name, 0) + 1 if there else 0
    self._gone[name] = 0 if there else self._gone.get(name, 0) + 1
    if name in self._told and self._gone[name] >= self.options.warn_steps:
      self._told.remove(name)
    if self._lasted[name] < steps or name in self._told:
      return []
    self._told.append(name)
    return [f'watch: {words}']

  def _rule(self, name: str, there: bool, steps: int, words: str) -> None:
    self._lasted[name] = self._lasted.get(name, 0) + 1 if there else 0
    if self.reason is None and self._lasted[name] >= steps:
      self.reason = words

  def _verdict(self) -> list[str]:
    """Tells the reason to stop, once."""
    if self.reason is None or 'stop' in self._told:
      return []
    self._told.append('stop')
    end = (
        'the run ends here'
        if self.options.stop
        else 'watch.stop=True would end the run here'
    )
    return [f'watch: {self.reason}: {end}']
