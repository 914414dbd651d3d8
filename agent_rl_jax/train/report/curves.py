"""Learning curves as a PNG, drawn from metric logs.

Uses matplotlib's Agg canvas directly: no display, no global state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from agent_rl_jax.train import whole_file
from agent_rl_jax.train.report import writers

# Title and y label of a panel -> metrics; '--' marks what evaluation measured.
PANELS: dict[str, Sequence[str]] = {
    'Reward': ('reward/total',),
    'Accuracy': ('episode/accuracy', 'eval/accuracy'),
    'Tool calls per episode': ('episode/tool_calls',),
    'Action tokens per episode': ('episode/action_tokens',),
}


def read_series(
    path: str | os.PathLike, names: Sequence[str]
) -> dict[str, tuple[list[int], list[float]]]:
  """Returns {name: (steps, values)} of the metrics that the log holds."""
  series: dict[str, tuple[list[int], list[float]]] = {}
  for record in writers.read_jsonl(path):
    for name in names:
      if name in record:
        steps, values = series.setdefault(name, ([], []))
        steps.append(record['step'])
        values.append(float(record[name]))
  return series


def draw_curves(
    logs: Mapping[str, str | os.PathLike],
    path: str | os.PathLike,
    title: str = '',
    panels: Mapping[str, Sequence[str]] = PANELS,
) -> None:
  """Draws one panel per entry of `panels`, one colour per log.

  Args:
    logs: Label of a run -> its metrics.jsonl.
    path: The PNG, written atomically.
    title: Above all panels.
    panels: Title -> metric names; the first of a panel is drawn as a line,
      the others, sparser, as marked lines.
  """
  from matplotlib import ticker  # here: slow to import
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  names = [name for panel in panels.values() for name in panel]
  runs = {label: read_series(log, names) for label, log in logs.items()}
  panels = {
      heading: metrics
      for heading, metrics in panels.items()
      if any(name in run for run in runs.values() for name in metrics)
  }
  columns = min(max(len(panels), 1), 2)
  lines = max(-(-len(panels) // columns), 1)
  figure = Figure(
      figsize=(5.2 * columns, 3.3 * lines), dpi=120, layout='constrained'
  )
  FigureCanvasAgg(figure)
  if title:
    figure.suptitle(title)
  for place, (heading, metrics) in enumerate(panels.items(), start=1):
    axes = figure.add_subplot(lines, columns, place)
    for color, (label, run) in enumerate(runs.items()):
      for index, name in enumerate(metrics):
        if name not in run:
          continue
        steps, values = run[name]
        axes.plot(
            steps,
            values,
            color=f'C{color}',
            linestyle='-' if index == 0 else '--',
            marker='o' if index or len(steps) == 1 else '',
            alpha=1.0 if index == 0 else 0.8,
            linewidth=1.6,
            label=label if len(metrics) == 1 else f'{label}: {name}',
        )
    axes.set_title(heading)
    axes.set_xlabel('iteration')
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if heading == 'Accuracy':
      axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
      axes.legend(frameon=False, fontsize='small')
  with whole_file.replacing(path) as partial:
    figure.savefig(partial, format='png')
