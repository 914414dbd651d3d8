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
from agent_rl_jax.batch import Extreme, Mean

COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'


def finalize(metrics: Mapping[str, Mean | Extreme]) -> dict[str, float]:
  """Divides every sum by its count, in one fetch; 0 where nothing counted."""
  # In float64, so that sums of float32 lose nothing by their division.
  fetched = jax.tree.map(np.float64, jax.device_get(dict(metrics)))
  return {name: float(metric.value()) for name, metric in fetched.items()}


def _actions(episode: types.Episode) -> list[list[int]]:
  """Sampled token ids of each turn."""
  return [
      episode.rows[turn.row]
      .tokens[turn.action_start : turn.action_stop]
      .tolist()
      for turn in episode.turns
  ]


def repetition(episode: types.Episode, n: int = 4) -> float:
  """Share of the n-grams of sampled tokens that were there before.

  1 - distinct / all (seq-rep-n of Welleck et al. 2020, arXiv 1908.04319), over
  the n-grams inside turns: writing the same turn twice repeats too.  0 when no
  turn has n tokens, for then nothing repeats.
  """
  grams = [
      gram
      for ids in _actions(episode)
      for gram in zip(*(ids[k:] for k in range(n)), strict=False)
  ]
  return 1 - len(set(grams)) / len(grams) if grams else 0.0


def input_dependence(
    episodes: Sequence[types.Episode], limit: int = 128
) -> Mean | None:
  """How well an episode's first action tells which task it was given.

  RAGEN-2 (arXiv 2604.06268) scores each sampled reasoning under every prompt
  of the batch and asks how often its own prompt gives the highest probability;
  that costs as many forward passes as there are prompts.  This stands in for
  it without a model.  Let A(i) be the set of unigrams and bigrams of the first
  `limit` tokens of episode i's first action, and s(i, k) the mean of the cosine
  |A(i) & A(m)| / sqrt(|A(i)| |A(m)|) over the episodes m != i of task k.  With
  K tasks,

    hit(i) = [own task in argmax_k s(i, k)] / |argmax_k s(i, k)|
    dependence = (mean_i hit(i) - 1/K) / (1 - 1/K)

  1: every first action is most like those of its own task.  0: chance, where
  tasks cannot be told apart by what is written.  Below 0 by chance only.

  Limits: it sees tokens, not meaning, so a template that copies one number of
  the problem still scores high, and a policy that is right in ever new words
  scores low; it saturates while RAGEN-2's mutual information still falls; a
  batch of few episodes is noisy (about sqrt(1 / episodes)).

  Args:
    episodes: Whole groups.  Groups of one task count as one.
    limit: Tokens of a first action that are read.

  Returns:
    Sum and count over the episodes whose task has another episode; None with
    fewer than two tasks or without such an episode, where it has no meaning.
  """
  first = [
      (episode.task.uid, ids[0][:limit])
      for episode in episodes
      if (ids := _actions(episode)) and ids[0]
  ]
  tasks = {uid: k for k, uid in enumerate(dict.fromkeys(u for u, _ in first))}
  task_B = np.array([tasks[uid] for uid, _ in first], np.int64)
  size_K = np.bincount(task_B, minlength=len(tasks))
  if len(tasks) < 2 or size_K.max() < 2:
    return None
  grams = [{*ids, *zip(ids, ids[1:], strict=False)} for _, ids in first]
  columns: dict[object, int] = {}
  column_P = np.array(
      [columns.setdefault(x, len(columns)) for s in grams for x in s], np.int64
  )
  length_B = np.array([len(s) for s in grams])
  norm_B = 1 / np.sqrt(length_B)
  # What each n-gram weighs in the episodes of each task, all added up.
  weight_MxK = np.bincount(
      column_P * len(tasks) + np.repeat(task_B, length_B),
      np.repeat(norm_B, length_B),
      minlength=len(columns) * len(tasks),
  ).reshape(len(columns), len(tasks))
  starts_B = np.cumsum(length_B) - length_B
  total_BxK = np.add.reduceat(weight_MxK[column_P], starts_B, axis=0)
  own_BxK = task_B[:, None] == np.arange(len(tasks))
  # Without the episode itself.
  total_BxK = total_BxK - own_BxK * (length_B * norm_B)[:, None]
  score_BxK = total_BxK * norm_B[:, None] / np.maximum(size_K - own_BxK, 1)
  best_BxK = score_BxK >= score_BxK.max(axis=1, keepdims=True) - 1e-9
  hit_B = (best_BxK & own_BxK).sum(axis=1) / best_BxK.sum(axis=1)
  chance = 1 / len(tasks)
  return _mean(((hit_B - chance) / (1 - chance))[size_K[task_B] > 1])


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
    tool_calls, malformed_turns, repetition}, episode/input_dependence where
    tasks have several episodes, tools/success_rate, time/tool_latency_mean
    (seconds of a call) and status/<name> (shares).
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
      'episode/repetition': _mean([repetition(e) for e in good]),
      'tools/success_rate': _mean([result.ok for result in results]),
      'time/tool_latency_mean': _mean([r.seconds for r in results]),
  }
  dependence = input_dependence(good)
  if dependence is not None:
    sums['episode/input_dependence'] = dependence
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
