"""A study's table and plot: means and spreads over seeds, with their tests.

Leaves out running it (`train/sweep.py`).  Invariant: every figure is computed
from the runs' own files; what no test can tell is shown as a dash.

The test is a paired two-sided t over seeds: of the gain (after RL minus the
cold start of the same seed), and of the difference to the baseline arm of the
same seed.  It asks about the algorithm, not about one trained policy, which a
test over problems would.  With three seeds it has two degrees of freedom and
sees large, steady differences only: not significant means not shown here, and
no correction is made for the number of arms.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl_jax.train import whole_file
from agent_rl_jax.train.report.curves import read_series

LEVEL = 0.05

# Accuracies are counts over problems: less than this is rounding.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class Paired:
  """Differences over seeds: mean, standard deviation, p; None if untold."""

  mean: float
  deviation: float | None
  p: float | None

  @property
  def significant(self) -> bool:
    return self.p is not None and self.p < LEVEL


def t_p_value(t: float, degrees: int) -> float:
  """P(|T| >= |t|) of Student's distribution with `degrees` >= 1.

  Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: finite sums for whole degrees
  of freedom.
  """
  if degrees < 1:
    raise ValueError(f'degrees={degrees} must be at least 1')
  theta = math.atan(abs(t) / math.sqrt(degrees))
  sine, cosine = math.sin(theta), math.cos(theta)
  if degrees % 2:
    terms, total = cosine, 0.0
    for k in range(1, degrees - 1, 2):
      total += terms
      terms *= cosine**2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (theta + sine * total)
  else:
    terms, total = 1.0, 0.0
    for k in range(0, degrees, 2):
      total += terms
      terms *= cosine**2 * (k + 1) / (k + 2)
    inside = sine * total
  return min(max(1 - inside, 0.0), 1.0)


def paired(differences: Sequence[float]) -> Paired:
  """Paired two-sided t test of `differences`, one for each seed.

  Equal differences have no p: with a spread of 0 the test assumes what it
  should find out.
  """
  n = len(differences)
  mean = statistics.fmean(differences)
  if n < 2:
    return Paired(mean, None, None)
  deviation = statistics.stdev(differences)
  if deviation < _EQUAL:
    return Paired(mean, 0.0, None)
  return Paired(
      mean, deviation, t_p_value(mean / (deviation / math.sqrt(n)), n - 1)
  )


def summarize(
    results: Sequence[Any], baseline: str, changes: Mapping[str, Mapping]
) -> list[dict[str, Any]]:
  """One JSON-able row per arm that has a result, in the order of `changes`.

  Args:
    results: `sweep.Result` of every finished run.
    baseline: Arm that the others are compared with, over common seeds.
    changes: {arm: {key: value}}: what each arm changes.
  """
  runs = {(r.arm, r.seed): r for r in results}

  def against(own: Sequence[Any], name: str) -> dict[str, Any] | None:
    pairs = [
        (getattr(r, name), getattr(runs[baseline, r.seed], name))
        for r in own
        if r.arm != baseline and (baseline, r.seed) in runs
    ]
    if not pairs or any(None in pair for pair in pairs):
      return None
    return dataclasses.asdict(paired([a - b for a, b in pairs]))

  rows = []
  for arm, changed in changes.items():
    own = [r for r in results if r.arm == arm]
    if not own:
      continue
    accuracy = [r.accuracy for r in own]
    training = [r.training for r in own if r.training is not None]
    rows.append(
        {
            'arm': arm,
            'changes': dict(changed),
            'runs': [
                {
                    'seed': r.seed,
                    'cold_start': r.start,
                    'accuracy': r.accuracy,
                    'training': r.training,
                    'seconds': r.seconds,
                }
                for r in own
            ],
            'accuracy': _mean_and_deviation(accuracy),
            'gain': dataclasses.asdict(
                paired([r.accuracy - r.start for r in own])
            ),
            'against_baseline': against(own, 'accuracy'),
            'training': _mean_and_deviation(training),
            'training_against_baseline': against(own, 'training'),
            'seconds_mean': statistics.fmean(r.seconds for r in own),
        }
    )
  return rows


def missing(
    results: Sequence[Any], arms: Sequence[str], seeds: Sequence[int]
) -> dict[str, list[int]]:
  """{arm: seeds without a result}, of the arms that lack one."""
  done = {(r.arm, r.seed) for r in results}
  lacking = {
      arm: [seed for seed in seeds if (arm, seed) not in done] for arm in arms
  }
  return {arm: seeds for arm, seeds in lacking.items() if seeds}


def mean_of(log: str | os.PathLike, metric: str) -> float | None:
  """Mean of a metric over the steps of a log; None where there is none."""
  if not os.path.exists(log):
    return None
  _, values = read_series(log, (metric,)).get(metric, ((), ()))
  return statistics.fmean(values) if values else None


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
  return {
      'mean': statistics.fmean(values) if values else None,
      'deviation': statistics.stdev(values) if len(values) > 1 else None,
  }


def _spread(of: Mapping[str, Any] | None, sign: bool = False) -> str:
  """'mean ± deviation', as far as they are known."""
  if of is None or of['mean'] is None:
    return ''
  text = f'{of["mean"]:+.3f}' if sign else f'{of["mean"]:.3f}'
  if of['deviation'] is None:
    return text
  return f'{text} ± {of["deviation"]:.3f}'


def _compared(of: Mapping[str, Any] | None) -> list[str]:
  """The cells of a difference and its p."""
  return ['', ''] if of is None else [_spread(of, sign=True), _p(of['p'])]


def _p(value: float | None) -> str:
  if value is None:
    return '–'
  return '< 0.001' if value < 0.001 else f'{value:.3f}'


def markdown(
    rows: Sequence[Mapping[str, Any]],
    baseline: str,
    problems: int,
    lacking: Mapping[str, Sequence[int]],
) -> str:
  """The table, and in words which arms are missing or did not improve.

  Args:
    rows: From `summarize`.
    baseline: Its name.
    problems: Of each evaluation.
    lacking: From `missing`.
  """
  columns = ('Arm', 'Seeds', 'After RL', 'Gain', 'p', f'Against {baseline}')
  columns += ('p', 'Over training', f'Against {baseline}', 'p', 'Seconds')
  columns += ('Changes',)
  lines = [
      f'After RL: accuracy on {problems} held-out problems, greedy, mean ±'
      ' standard deviation over seeds. Gain: over the cold start. Over'
      ' training: mean over iterations of the accuracy of the sampled'
      ' episodes, that is how fast it learned. p: of a paired two-sided t test'
      ' over seeds. Seconds: of rollouts and updates.',
      '',
      f'| {" | ".join(columns)} |',
      '| --- ' * len(columns) + '|',
  ]
  for row in rows:
    changed = ', '.join(f'{k}={v}' for k, v in row['changes'].items())
    cells = [
        row['arm'],
        str(len(row['runs'])),
        _spread(row['accuracy']),
        *_compared(row['gain']),
        *_compared(row['against_baseline']),
        _spread(row['training']),
        *_compared(row['training_against_baseline']),
        f'{row["seconds_mean"]:.0f}',
        f'`{changed}`' if changed else '',
    ]
    lines.append(f'| {" | ".join(cells)} |')
  flat = [row['arm'] for row in rows if not _improves(row['gain'])]
  names = lambda arms: ', '.join(arms) if arms else 'none'
  lines += [
      '',
      f'Not significantly better than the cold start (p >= {LEVEL}, no p or no'
      f' gain): {names(flat)}.',
  ]
  for key, what in (
      ('against_baseline', 'After RL'),
      ('training_against_baseline', 'Over training'),
  ):
    told = [row for row in rows if row[key] and Paired(**row[key]).significant]
    better = [row['arm'] for row in told if row[key]['mean'] > 0]
    worse = [row['arm'] for row in told if row[key]['mean'] < 0]
    lines.append(
        f'{what} significantly better than {baseline}: {names(better)};'
        f' significantly worse: {names(worse)}.'
    )
  if lacking:
    told = ', '.join(
        f'{arm} (seed {", ".join(map(str, seeds))})'
        for arm, seeds in lacking.items()
    )
    lines += [
        '',
        'Missing above, as these runs failed or were left out, so that nothing'
        f' is said of them: {told}.',
    ]
  return '\n'.join(lines) + '\n'


def _improves(gain: Mapping[str, Any]) -> bool:
  return gain['mean'] > 0 and Paired(**gain).significant


def draw(
    logs: Mapping[str, Sequence[str | os.PathLike]],
    path: str | os.PathLike,
    baseline: str,
    metric: str = 'episode/accuracy',
) -> None:
  """Draws one panel per arm, on common axes, written atomically.

  The line is the mean over seeds, the band their least and greatest value;
  the baseline's mean is grey in every panel.

  Args:
    logs: {arm: metrics.jsonl of each seed}.
    path: The PNG.
    baseline: Arm in grey.
    metric: What is drawn.
  """
  from matplotlib import ticker  # here: slow to import
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  curves = {arm: _band(files, metric) for arm, files in logs.items()}
  curves = {arm: curve for arm, curve in curves.items() if curve[0]}
  columns = min(max(len(curves), 1), 5)
  rows = max(-(-len(curves) // columns), 1)
  figure = Figure(
      figsize=(2.6 * columns, 2.1 * rows), dpi=110, layout='constrained'
  )
  FigureCanvasAgg(figure)
  for place, (arm, (steps, mean, low, high)) in enumerate(curves.items(), 1):
    axes = figure.add_subplot(rows, columns, place)
    if baseline in curves and arm != baseline:
      axes.plot(*curves[baseline][:2], color='0.6', linewidth=1.0)
    axes.fill_between(steps, low, high, color='C0', alpha=0.25, linewidth=0)
    axes.plot(steps, mean, color='C0', linewidth=1.4)
    axes.set_title(arm, fontsize='small')
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
    axes.tick_params(labelsize='x-small')
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
  figure.supxlabel('iteration', fontsize='small')
  figure.supylabel(metric, fontsize='small')
  with whole_file.replacing(path) as partial:
    figure.savefig(partial, format='png')


def _band(
    files: Sequence[str | os.PathLike], metric: str
) -> tuple[list[int], list[float], list[float], list[float]]:
  """(steps, mean, least, greatest) over the logs that reach each step."""
  values: dict[int, list[float]] = {}
  for file in files:
    for step, value in zip(
        *read_series(file, (metric,)).get(metric, ((), ())), strict=True
    ):
      values.setdefault(step, []).append(value)
  steps = sorted(values)
  return (
      steps,
      [statistics.fmean(values[s]) for s in steps],
      [min(values[s]) for s in steps],
      [max(values[s]) for s in steps],
  )
