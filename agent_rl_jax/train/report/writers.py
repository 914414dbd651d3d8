"""Metric and trajectory logs: JSON lines and TensorBoard event files.

Leaves out what is logged.  Invariant: after a resume a log holds exactly the
lines up to the checkpoint's step, then what the continuation writes, so that
a killed and an uninterrupted run leave equal logs (times and memory aside).
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agent_rl_jax.train import whole_file


class Writer(Protocol):
  """Where metrics go."""

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Logs the values of one step; steps never decrease."""

  def close(self) -> None:
    """Writes out what is buffered."""


def read_jsonl(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """Yields the whole lines of a log; a torn last line ends it.

  A line that is torn because the process died has no newline, or is followed
  by none that is whole.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return
  with open(path, 'rb') as file:
    for line in file:
      if not line.endswith(b'\n'):
        return
      try:
        record = json.loads(line)
      except ValueError:
        return
      yield record


def _jsonable(value: Any) -> Any:
  """Plain JSON values; NaN and infinities as text that float() reads."""
  if isinstance(value, Mapping):
    return {str(key): _jsonable(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_jsonable(item) for item in value]
  if hasattr(value, 'tolist'):  # numpy and jax scalars and arrays
    return _jsonable(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return repr(value)
  return value


class JsonlWriter:
  """Appends one JSON object a line, flushed, with its step first.

  Args:
    path: The log.
    resume_step: Step of the checkpoint that the run continues from: later
      lines are dropped, atomically.  -1 starts an empty log.
  """

  def __init__(self, path: str | os.PathLike, resume_step: int = -1):
    self._path = pathlib.Path(path)
    with (
        whole_file.replacing(self._path) as partial,
        open(partial, 'w', encoding='utf-8') as file,
    ):
      for record in read_jsonl(self._path):
        if record['step'] <= resume_step:
          file.write(json.dumps(record) + '\n')
      file.flush()
      os.fsync(file.fileno())
    self._file = open(self._path, 'a', encoding='utf-8')

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    line = json.dumps({'step': int(step), **_jsonable(metrics)})
    self._file.write(line + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorBoardWriter:
  """Scalars as TensorBoard event files, without TensorFlow.

  Steps after `resume_step` that an earlier process wrote are hidden by the
  reader (TensorBoard's purge step), since event files only grow.
  """

  def __init__(self, folder: str | os.PathLike, resume_step: int = -1):
    import tensorboardX  # here: slow to import, and optional by config

    self._writer = tensorboardX.SummaryWriter(
        str(folder), purge_step=resume_step + 1
    )

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
      if (
          isinstance(value, (bool, int, float))
          or getattr(value, 'ndim', None) == 0
      ):
        self._writer.add_scalar(name, float(value), int(step))

  def close(self) -> None:
    self._writer.close()


class Writers:
  """Several writers as one."""

  def __init__(self, *writers: Writer):
    self._writers = writers

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    for writer in self._writers:
      writer.write(step, metrics)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


def make_metric_writers(
    run_dir: str | os.PathLike,
    *,
    jsonl: bool,
    tensorboard: bool,
    resume_step: int = -1,
    name: str = 'metrics',
) -> Writers:
  """Opens `<name>.jsonl` and `tensorboard/<name>` in the run folder."""
  run_dir = pathlib.Path(run_dir)
  writers: list[Writer] = []
  if jsonl:
    writers.append(JsonlWriter(run_dir / f'{name}.jsonl', resume_step))
  if tensorboard:
    writers.append(
        TensorBoardWriter(run_dir / 'tensorboard' / name, resume_step)
    )
  return Writers(*writers)
