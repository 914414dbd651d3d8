"""Metrics on the host: sums divided, episodes counted, compiles, memory.

Nothing here runs inside compiled code.  Invariant: whatever depends on the
wall-clock or on memory is named `time/...` or `memory/...`; every other metric
is a function of the run's config and of what the tools answered.
"""

from __future__ import annotations

import collections
import contextlib
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from agent_rl_jax import types
from agent_rl_jax.batch import Mean

COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


def finalize(metrics: Mapping[str, Mean]) -> dict[str, float]:
  """Divides every sum by its count, in one fetch; 0 where the count is 0."""
  fetched = jax.device_get(dict(metrics))
  out = {}
  for name, mean in fetched.items():
    count = float(mean.count)
    out[name] = float(mean.total) / count if count else 0.0
  return out


def _mean(values: Sequence[float]) -> Mean:
  return Mean(
      np.float64(np.sum(np.asarray(values, np.float64))),
      np.float64(len(values)),
  )


def episode_sums(
    episodes: Sequence[types.Episode],
    returns: Sequence[float],
    accuracy: Sequence[float],
) -> dict[str, Mean]:
  """Sums over episodes, which add up over processes.

  Failed episodes (infrastructure) enter `status/...` only.

  Args:
    episodes: Finished and scored episodes, whole groups.
    returns: The scalar reward of each episode.
    accuracy: The unshaped measure of each episode.

  Returns:
    reward/total, reward/<component>, episode/{accuracy, action_tokens, turns,
    tool_calls, malformed_turns}, tools/success_rate,
    time/tool_latency_mean (seconds of a call) and status/<name> (shares).
  """
  if not len(episodes) == len(returns) == len(accuracy):
    raise ValueError(
        f'{len(episodes)} episodes, {len(returns)} returns and'
        f' {len(accuracy)} accuracies must be equally many'
    )
  valid = [i for i, e in enumerate(episodes) if not e.status.failed]
  good = [episodes[i] for i in valid]
  results = [r for e in good for turn in e.turns for r in turn.tool_results]
  sums = {
      'reward/total': _mean([returns[i] for i in valid]),
      'episode/accuracy': _mean([accuracy[i] for i in valid]),
      'episode/action_tokens': _mean([e.num_action_tokens for e in good]),
      'episode/turns': _mean([len(e.turns) for e in good]),
      'episode/tool_calls': _mean([e.num_tool_calls for e in good]),
      'episode/malformed_turns': _mean(
          [sum(t.action.error is not None for t in e.turns) for e in good]
      ),
      'tools/success_rate': _mean([result.ok for result in results]),
      'time/tool_latency_mean': _mean([r.seconds for r in results]),
  }
  for name in sorted({name for e in good for name in e.rewards}):
    sums[f'reward/{name}'] = _mean(
        [e.rewards[name] for e in good if name in e.rewards]
    )
  for status in types.Status:
    sums[f'status/{status.value}'] = _mean(
        [episode.status is status for episode in episodes]
    )
  return sums


def episode_metrics(
    episodes: Sequence[types.Episode],
    returns: Sequence[float],
    accuracy: Sequence[float],
) -> dict[str, float]:
  """`episode_sums`, divided, with the maxima and counts that do not add up.

  Adds time/tool_latency_max, and failures/episodes: the number of episodes
  that infrastructure failed, which are in no other mean.
  """
  metrics = finalize(episode_sums(episodes, returns, accuracy))
  metrics['time/tool_latency_max'] = max(
      (
          result.seconds
          for episode in episodes
          for turn in episode.turns
          for result in turn.tool_results
      ),
      default=0.0,
  )
  metrics['failures/episodes'] = float(
      sum(episode.status.failed for episode in episodes)
  )
  return metrics


class CompileCounter:
  """Counts backend compiles, of all threads, while it is open.

  A program loaded from JAX's persistent cache counts too: the process had
  not built that shape yet.
  """

  def __init__(self):
    self.count = 0
    self.seconds = 0.0
    self._lock = threading.Lock()

  def _listen(self, event: str, seconds: float, **_) -> None:
    if event == COMPILE_EVENT:
      with self._lock:
        self.count += 1
        self.seconds += seconds

  def __enter__(self) -> CompileCounter:
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *_) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)


class Stopwatch:
  """Seconds spent in named parts since the last `take`."""

  def __init__(self):
    self._seconds = collections.defaultdict(float)

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Adds the time of the `with` body to `name`, also when it raises."""
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[name] += time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns {'time/<name>': seconds} and starts again from zero."""
    taken = {f'time/{name}': value for name, value in self._seconds.items()}
    self._seconds.clear()
    return taken


def host_memory() -> dict[str, float]:
  """Returns memory/host_peak_mb and, where /proc tells, memory/host_rss_mb.

  MB are 10**6 bytes, of this process alone.
  """
  try:
    with open('/proc/self/status', encoding='ascii', errors='replace') as file:
      fields = dict(line.split(':', 1) for line in file if ':' in line)
    kibibytes = {
        'memory/host_rss_mb': int(fields['VmRSS'].split()[0]),
        'memory/host_peak_mb': int(fields['VmHWM'].split()[0]),
    }
    return {name: value * 1024 / 1e6 for name, value in kibibytes.items()}
  except (OSError, KeyError, ValueError):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage counts bytes on macOS and kibibytes elsewhere.
    scale = 1 if sys.platform == 'darwin' else 1024
    return {'memory/host_peak_mb': peak * scale / 1e6}
