"""A whole run: cold start, RL, and what it is compared with.

Leaves out how each stage works (`cold_start.py`, `arm.py`).  Invariant: the
run folder tells everything; running the same command again goes on where the
last process ended, wherever that was.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent_rl_jax.rollout.engine import Interrupted
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.train import settings as settings_lib
from agent_rl_jax.train.arm import Arm, ArmResult
from agent_rl_jax.train.cold_start import ColdStart
from agent_rl_jax.train.loop import Trainer
from agent_rl_jax.train.parts import Parts, build
from agent_rl_jax.train.report.curves import draw_curves
from agent_rl_jax.train.settings import Settings
from agent_rl_jax.train.stage import write_json


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
  """Ctrl-C and SIGTERM set `stop`; a second one ends the process at once."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def ask(number, frame):
    del frame
    if stop.is_set():
      raise KeyboardInterrupt
    stop.set()
    print(
        f'\n{signal.Signals(number).name}: saving at the next safe point'
        ' (again to end at once)',
        flush=True,
    )

  kept = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for number, handler in kept.items():
      signal.signal(number, handler)


class RunError(ValueError):
  """What a user can mend: a wrong path, a folder of another run, a mesh."""


def run(
    config: Mapping[str, Any],
    settings: Settings,
    cold_start_only: bool = False,
) -> dict[str, Any] | None:
  """Runs everything that the config asks for.

  Args:
    config: The run's config; written to the run folder.
    settings: Resolved from it.
    cold_start_only: End after the cold start and its evaluation.

  Returns:
    The summary, also written to summary.json; None when interrupted, or
    when RL was left out.

  Raises:
    RunError: the folder belongs to another run, or a part cannot be built.
  """
  started = time.monotonic()
  run_dir = pathlib.Path(settings.run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)
  taken = config_lib.claim(run_dir, config, 'run')
  if taken:
    raise RunError(taken)
  try:
    parts = build(settings)
  except ValueError as error:
    raise RunError(str(error)) from error
  print(f'run folder {run_dir}, seed {settings.seed}')
  print(settings_lib.describe(settings))
  print(parts.protection(), flush=True)
  try:
    with stop_on_signals(parts.stop), metrics_lib.CompileCounter() as compiles:
      results = _stages(parts, config, compiles, cold_start_only)
  except Interrupted:
    print(
        f'Saved in {run_dir}. To go on, run the same command again.', flush=True
    )
    return None
  finally:
    parts.close()
  if cold_start_only:
    print(table(results, settings.eval.final_problems))
    return None
  return _summary(settings, results, time.monotonic() - started)


def _stages(
    parts: Parts, config: Mapping[str, Any], compiles, cold_start_only: bool
) -> dict[str, ArmResult]:
  """Runs the stages in order; finished ones are read back."""
  settings = parts.settings
  start: Callable[[], Any] = lambda: parts.params
  results: dict[str, ArmResult] = {}
  trainer = Trainer(parts)
  sft = settings.sft
  if sft.exercise_steps + sft.steps:
    params = ColdStart(parts, config, compiles).run()
    start = lambda: params
    results['cold start'] = _untrained(
        trainer, 'cold_start_evaluation', config, compiles
    ).run(start)
  if cold_start_only:
    return results
  if settings.train.iterations:
    arm = Arm(trainer, 'rl', parts.engine, config, compiles)
    results['after RL'] = arm.run(start)
    if settings.eval.without_tool:
      arm = Arm(
          trainer,
          'without_tool',
          parts.engine_without_tools(),
          config,
          compiles,
          poor_start=True,
      )
      results['text only'] = arm.run(start)
  elif not results:
    results['start'] = _untrained(trainer, 'start', config, compiles).run(start)
  return results


def _untrained(trainer: Trainer, name: str, config, compiles) -> Arm:
  """An arm of no iterations: evaluates the start."""
  arm = Arm(trainer, name, trainer.parts.engine, config, compiles)
  arm.stage.total = 0
  return arm


def _summary(
    settings: Settings, results: Mapping[str, ArmResult], seconds: float
) -> dict[str, Any]:
  run_dir = pathlib.Path(settings.run_dir)
  logs = {
      label: run_dir / folder / 'metrics.jsonl'
      for label, folder in (('RL', 'rl'), ('text only', 'without_tool'))
      if (run_dir / folder / 'metrics.jsonl').exists()
  }
  if settings.report.curves and logs:
    draw_curves(logs, run_dir / 'curves.png', run_dir.name)
  summary = {
      'seed': settings.seed,
      'problems': settings.eval.final_problems,
      'accuracy': {name: r.accuracy for name, r in results.items()},
      'tool_calls': {
          name: r.metrics['episode/tool_calls'] for name, r in results.items()
      },
      'seconds': {name: r.seconds for name, r in results.items()},
      'seconds_of_this_process': seconds,
  }
  write_json(run_dir / 'summary.json', summary)
  print(table(results, settings.eval.final_problems))
  print(f'figures: {run_dir / "summary.json"}')
  print(f'episodes to read: {run_dir}/*/trajectories/*.html')
  return summary


def table(results: Mapping[str, ArmResult], problems: int) -> str:
  """The comparison, side by side."""
  names = list(results)
  widths = [max(len(name), 8) for name in names]
  cells = lambda values: '  '.join(
      f'{value:>{width}}' for value, width in zip(values, widths, strict=True)
  )
  rows = {
      'accuracy': [f'{r.accuracy:.3f}' for r in results.values()],
      'tool calls': [
          f'{r.metrics["episode/tool_calls"]:.2f}' for r in results.values()
      ],
      'action tokens': [
          f'{r.metrics["episode/action_tokens"]:.1f}' for r in results.values()
      ],
  }
  head = f'{problems} held-out problems, greedy'
  left = max(len(head), *map(len, rows))
  lines = [f'{head:<{left}}  {cells(names)}']
  lines += [f'{name:<{left}}  {cells(v)}' for name, v in rows.items()]
  return '\n'.join(lines)
