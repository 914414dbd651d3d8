"""What every stage of a run shares: its folder, logs, checkpoints, clock.

A stage (cold start, an RL arm) is a loop of numbered steps.  This file keeps
the bookkeeping of such a loop; what a step does is the stage's own.
Invariant: log lines and checkpoints agree, so that a resumed stage leaves the
same files as an uninterrupted one, times and memory aside.
"""

from __future__ import annotations

import collections
import json
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agent_rl_jax.rollout.engine import Interrupted
from agent_rl_jax.train import whole_file
from agent_rl_jax.train.checkpoint import Checkpoints
from agent_rl_jax.train.report.progress import Progress
from agent_rl_jax.train.report.writers import make_metric_writers, read_jsonl
from agent_rl_jax.train.settings import Settings


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON so that the file is whole or absent."""
  with whole_file.replacing(path) as partial:
    partial.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


class Stage:
  """One resumable loop of `total` steps in a folder of the run.

  Args:
    settings: Of the run.
    name: Folder of the stage, and its name on the progress bar.
    total: Steps.
    every: Steps between checkpoints.
    depends: Flat config that a continuation depends on.
    stop: Set when the run should end.
  """

  def __init__(
      self,
      settings: Settings,
      name: str,
      total: int,
      every: int,
      depends: Mapping[str, Any],
      stop: threading.Event,
  ):
    self.folder = pathlib.Path(settings.run_dir) / name
    self.name, self.total, self.step = name, total, 0
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self._every, self._stop, self._report = every, stop, settings.report
    self._checkpoints = Checkpoints(
        self.folder / 'checkpoints', settings.checkpoint.keep, depends
    )
    self._saved: int | None = None
    self._writers = None
    self._progress: Progress | None = None

  @property
  def done(self) -> bool:
    return self.step >= self.total

  def restore(self, abstract: Any) -> tuple[Any, dict] | None:
    """(state, host state) of the last checkpoint; None begins anew."""
    found = self._checkpoints.restore(abstract)
    if found is None:
      return None
    state, host = found
    self.step = self._saved = host['step']
    self.seconds.update(host['seconds'])
    return state, host

  def files(self) -> dict[str, bytes]:
    """Ragged files of the checkpoint that was restored; {} of none."""
    if self._saved is None:
      return {}
    return self._checkpoints.files(self._saved)

  def begin(self) -> None:
    """Opens logs, cut back to the checkpoint that the stage goes on from."""
    report = self._report
    self._writers = make_metric_writers(
        self.folder,
        jsonl=report.jsonl,
        tensorboard=report.tensorboard,
        resume_step=self.step if self._saved is not None else -1,
    )
    self._progress = Progress(
        self.name.replace('_', ' '),
        self.total,
        self.step,
        enabled=report.progress,
        log_every=report.log_every,
    )

  def say(self, text: str) -> None:
    if self._progress is None:
      print(text, flush=True)
    else:
      self._progress.say(text)

  def log(self, metrics: Mapping[str, float]) -> None:
    """Closes a step: counts it, writes and shows its metrics."""
    self.step += 1
    self._writers.write(self.step, metrics)
    self._progress.update(self.step, metrics)

  def note(self, metrics: Mapping[str, float]) -> None:
    """Adds to the log of the step that was closed last."""
    self._writers.write(self.step, metrics)

  def noted(self, name: str) -> float | None:
    """The metric `name` in the log of the last step; None if it is not."""
    for record in read_jsonl(self.folder / 'metrics.jsonl'):
      if record['step'] == self.step and name in record:
        return float(record[name])
    return None

  def save(
      self,
      state: Any,
      host: Mapping[str, Any],
      files: Callable[[], Mapping[str, bytes]] = dict,
      force: bool = False,
  ) -> None:
    """Saves when a checkpoint is due, or when forced; asynchronously.

    Args:
      state: Tree of arrays.
      host: JSON-able.
      files: Makes the ragged files; called only when something is saved.
      force: Save now, due or not.
    """
    due = self.step % self._every == 0 or self.done or force
    if not due or self._saved == self.step:
      return
    self._checkpoints.save(
        self.step,
        state,
        {**host, 'step': self.step, 'seconds': dict(self.seconds)},
        files(),
    )
    self._saved = self.step

  def check_stop(self) -> None:
    """Raises Interrupted when the run was asked to end."""
    if self._stop.is_set():
      raise Interrupted

  def close(self) -> None:
    """Waits for the save in progress and closes the logs."""
    if self._progress is not None:
      self._progress.close()
    if self._writers is not None:
      self._writers.close()
    self._checkpoints.wait()
    self._checkpoints.close()
