"""The progress bar; plain lines where there is no terminal.

Leaves out measuring: it shows what the step's metrics hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

import tqdm

# What is shown, its metric, its format.
SHOWN = {
    'reward': ('reward/total', '{:.2f}'),
    'accuracy': ('episode/accuracy', '{:.2f}'),
    'loss': ('train/loss', '{:.3f}'),
    'tok/s': ('time/tokens_per_second', '{:.0f}'),
}


def clock(seconds: float) -> str:
  """Returns seconds as m:ss, or h:mm:ss from an hour on."""
  minutes, seconds = divmod(max(int(round(seconds)), 0), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02d}:{seconds:02d}'
  return f'{minutes}:{seconds:02d}'


class Progress:
  """Shows steps done, chosen metrics and the time left.

  Args:
    name: What is running.
    total: Steps of the run.
    start: Steps done before (a resume); no time is counted for them.
    enabled: False shows nothing.
    log_every: Steps between lines where `stream` is no terminal.
    stream: stderr by default.
  """

  def __init__(
      self,
      name: str,
      total: int,
      start: int = 0,
      *,
      enabled: bool = True,
      log_every: int = 1,
      stream: TextIO | None = None,
  ):
    self._name, self._total, self._start = name, total, start
    self._stream = stream if stream is not None else sys.stderr
    self._log_every = log_every
    self._begin = time.monotonic()
    self._bar = None
    self._lines = enabled
    if enabled and self._stream.isatty():
      self._lines = False
      self._bar = tqdm.tqdm(
          total=total,
          initial=start,
          desc=name,
          file=self._stream,
          dynamic_ncols=True,
          bar_format=(
              '{desc} {bar} {n_fmt}/{total_fmt}{postfix} [{elapsed} <'
              ' {remaining}]'
          ),
      )

  def update(self, step: int, metrics: Mapping[str, float]) -> None:
    """Shows that `step` steps are done, with the last one's metrics."""
    shown = {
        name: form.format(metrics[metric])
        for name, (metric, form) in SHOWN.items()
        if metric in metrics
    }
    if self._bar is not None:
      self._bar.set_postfix(shown, refresh=False)
      self._bar.update(step - self._bar.n)
    elif self._lines and (step % self._log_every == 0 or step == self._total):
      spent = time.monotonic() - self._begin
      done = max(step - self._start, 1)
      left = spent / done * (self._total - step)
      text = ' '.join(f'{name} {value}' for name, value in shown.items())
      print(
          f'{self._name} {step}/{self._total} {text} [{clock(spent)} <'
          f' {clock(left)}]',
          file=self._stream,
          flush=True,
      )

  def say(self, text: str) -> None:
    """Prints a line without tearing the bar."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    """Leaves the last state of the bar on the terminal."""
    if self._bar is not None:
      self._bar.close()
