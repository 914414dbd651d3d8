"""BRIDGE: from tasks to a batch of one fixed shape, whatever is filtered away.

An iteration plays waves of tasks, scores them, filters groups, and fills the
batch with the surplus of the iteration before, then fresh groups, then
replayed ones.  Filters that judge a group by itself play new tasks until the
batch is full; filters that rank leave rows that count nowhere.  What still is
missing is empty rows.  Leaves out how groups become rows (`assemble.py`), what
is kept (`buffer.py`) and the update.  Invariants: the batch has
`train.prompts * train.samples` rows; every iteration plays at least one group
with its own policy, and trains on all surplus that it finds, so that surplus
is one iteration old and no more; and a collection that is interrupted leaves
no trace here (tasks and rewards, which have moved on, are set back by the
arm).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_rl_jax.algorithms import anchors, filters
from agent_rl_jax.algorithms.advantages import NEEDS_GREEDY_BASELINE
from agent_rl_jax.batch import TrajectoryBatch
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.slots import Purpose
from agent_rl_jax.rollout.stats import RolloutStats
from agent_rl_jax.train import buffer
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.train.assemble import (
    assemble,
    overlong_metrics,
    penalty,
)
from agent_rl_jax.train.evaluate import Scored, join, score
from agent_rl_jax.train.group import Group, table
from agent_rl_jax.train.parts import Parts
from agent_rl_jax.train.settings import Settings
from agent_rl_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Collected:
  """What an iteration trains on.

  Attributes:
    batch: One row per episode; on the host.
    scored: The episodes of its rows, with the returns that are optimized.
    played: Every episode that was sampled in this iteration.
    stats: Of all its rollouts.
    metrics: Of what was played, filtered, kept and replayed.
    notes: What the log should say.
  """

  batch: TrajectoryBatch
  scored: Scored
  played: Scored
  stats: RolloutStats
  metrics: dict[str, float]
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Wave:
  """One rollout: its groups and which of them the filter keeps."""

  groups: list[Group]
  kept: np.ndarray
  played: Scored
  greedy: Scored
  stats: RolloutStats


class Collector:
  """Collects the batches of one arm.

  Attributes:
    kept: What outlives an iteration; immutable, replaced by `collect`.
  """

  def __init__(self, parts: Parts, engine: Engine, rewards: Any, tasks: Any):
    """Nothing is played yet.

    Args:
      parts: Settings and threads.
      engine: Plays the arm's episodes.
      rewards: Judges them.
      tasks: A TaskStream.
    """
    settings = parts.settings
    self._settings = settings
    self._judges = parts.judges
    self._engine, self._rewards, self._tasks = engine, rewards, tasks
    self._greedy = settings.algorithm.advantage in NEEDS_GREEDY_BASELINE
    self.kept = buffer.Kept()

  def collect(self, params: Any, iteration: int) -> Collected:
    """The batch of an iteration.

    Args:
      params: Rollout parameters.
      iteration: Names episodes and draws; the policy version of what is
        played.

    Raises:
      Interrupted: asked to end; `kept` is as it was.
    """
    settings, options = self._settings, self._settings.filter
    prompts = settings.train.prompts
    watch = metrics_lib.Stopwatch()
    surplus = self.kept.surplus
    # Replay takes the room that surplus leaves, which would else wait for ever
    # longer where replay may have most of the batch.
    replayed = buffer.draw(
        self.kept.replay,
        min(settings.replay.groups(prompts), prompts - len(surplus)),
        settings.replay,
        iteration,
        settings.seed,
    )
    wanted = prompts - len(replayed)
    waves: list[_Wave] = []
    fresh = [(group, True) for group in surplus]
    # The first wave plays what surplus leaves open, or as much surplus would
    # be left again; but not nothing, so that every iteration measures its own
    # policy.
    count = max(1, wanted - len(surplus))
    while not waves or (
        options.resamples and len(fresh) < wanted and len(waves) < options.tries
    ):
      wave = self._wave(params, iteration, len(waves), count, watch)
      count = wanted
      waves.append(wave)
      fresh += [
          (group, bool(keep))
          for group, keep in zip(wave.groups, wave.kept, strict=True)
          if keep or not options.resamples
      ]
    used, left = fresh[:wanted], fresh[wanted:]
    scored, batch = assemble(
        settings,
        [group for group, _ in used] + replayed,
        [keep for _, keep in used] + [True] * len(replayed),
        fresh=len(used),
    )
    self.kept = buffer.Kept(
        surplus=tuple(group for group, _ in left),
        replay=buffer.admit(
            self.kept.replay,
            [group for group, keep in used if keep],
            settings.replay,
            iteration,
        ),
    )
    played = join([wave.played for wave in waves])
    stats = sum((wave.stats for wave in waves[1:]), waves[0].stats)
    metrics = played.metrics() | stats.metrics(settings.rollout.slots)
    metrics |= watch.take() | overlong_metrics(settings, scored)
    metrics['collect/return_std'] = _return_std(waves)
    if self._greedy:
      metrics |= _greedy_metrics(join([wave.greedy for wave in waves]))
    missing = prompts - len(used) - len(replayed)
    if options.name != 'none' or settings.replay.capacity:
      ages = [iteration - group.version for group in replayed]
      metrics |= {
          'collect/waves': float(len(waves)),
          'collect/kept_fraction': _kept_fraction(waves),
          'collect/surplus': float(len(left)),
          'collect/missing_groups': float(missing),
          'replay/size': float(len(self.kept.replay)),
          'replay/share': len(replayed) / prompts,
          'replay/age': float(np.mean(ages)) if ages else 0.0,
      }
    notes = [_missing(waves, missing, settings, iteration)] if missing else []
    if settings.algorithm.advantage == 'gigpo':
      share = anchors.anchored_fraction(batch)
      metrics['gigpo/anchored_fraction'] = share
      # Once, in a run that is resumed too.
      if iteration == 0 and not share and batch.valid.any():
        notes.append(_anchorless(batch, settings, iteration))
    return Collected(batch, scored, played, stats, metrics, tuple(notes))

  def _wave(
      self,
      params: Any,
      iteration: int,
      wave: int,
      count: int,
      watch: metrics_lib.Stopwatch,
  ) -> _Wave:
    """Plays, scores and filters `count` new tasks."""
    train = self._settings.train
    tasks: list[Task] = self._tasks.take(count)
    requests = []
    for g, task in enumerate(tasks):
      first = first_uid(train, iteration, wave) + g * train.samples
      requests += [Request(task, first + i, g) for i in range(train.samples)]
      if self._greedy:
        requests.append(Request(task, first, g, greedy=True))
    with watch.part('rollout_s'):
      episodes, stats = self._engine.rollout(
          params, requests, purpose=Purpose.TRAIN, version=iteration
      )
    with watch.part('reward_s'):
      # Greedy episodes are groups of their own, so that rewards that compare
      # the members of a group do not see them.
      played, greedy = (
          score(
              [
                  episode
                  for request, episode in zip(requests, episodes, strict=True)
                  if request.greedy == is_greedy
              ],
              self._rewards,
              iteration,
              self._judges,
              self._settings.rollout.step_timeout,
          )
          for is_greedy in (False, True)
      )
    groups = self._groups(played, greedy)
    chosen = filters.kept_groups(
        table(groups, 'returns'), table(groups, 'metric'), self._settings.filter
    )
    kept = np.zeros(len(groups), bool)
    kept[chosen] = True
    if self._greedy:
      # Without a baseline it has no advantage, now or replayed.
      kept &= [group.baseline is not None for group in groups]
    return _Wave(groups, kept, played, greedy, stats)

  def _groups(self, played: Scored, greedy: Scored) -> list[Group]:
    samples = self._settings.train.samples
    groups = []
    for g in range(len(played.episodes) // samples):
      part = slice(g * samples, (g + 1) * samples)
      baseline = None
      if self._greedy and greedy.valid[g]:
        charged = penalty(self._settings, [greedy.episodes[g]])[0]
        baseline = float(greedy.returns[g] + charged)
      groups.append(
          Group(
              tuple(played.episodes[part]),
              played.returns[part],
              played.accuracy[part],
              played.valid[part],
              baseline,
          )
      )
    return groups


def first_uid(train: Any, iteration: int, wave: int) -> int:
  """First episode of a wave: unique over the run, whatever was played before.

  Args:
    train: TrainOptions.
    iteration: From 0.
    wave: Within the iteration, from 0.
  """
  return (wave * train.iterations + iteration) * train.prompts * train.samples


def _kept_fraction(waves: Sequence[_Wave]) -> float:
  return float(np.concatenate([wave.kept for wave in waves]).mean())


def _return_std(waves: Sequence[_Wave]) -> float:
  """Mean std of raw returns inside the groups played, kept or not.

  Of valid members, groups of more than one; 0 where there is none.  Another
  than 'group/return_std', which is of the groups in the batch and of the
  returns that are optimized, penalties for length included.
  """
  groups = [g for wave in waves for g in wave.groups if g.valid.sum() > 1]
  if not groups:
    return 0.0
  return float(filters.group_scores(table(groups, 'returns'), 'std').mean())


def _missing(
    waves: Sequence[_Wave], missing: int, settings: Settings, iteration: int
) -> str:
  """Says that a batch could not be filled."""
  kept = np.concatenate([wave.kept for wave in waves])
  return (
      f'iteration {iteration + 1}: {missing} of {settings.train.prompts} groups'
      f' are missing, their rows empty: filter.name={settings.filter.name!r}'
      f' kept {kept.sum()} of {len(kept)} groups in {len(waves)} waves of tasks'
  )


def _anchorless(
    batch: TrajectoryBatch, settings: Settings, iteration: int
) -> str:
  """Says that gigpo compares no steps."""
  if (batch.anchor >= 0).any():
    why = 'no state is visited twice in a group; see algorithm.similarity'
  else:
    why = (
        f'the environment {settings.env_name!r} names no state'
        ' (Observation.state_key)'
    )
  return (
      f"iteration {iteration + 1}: algorithm.advantage='gigpo' is grpo here:"
      f' {why}'
  )


def _greedy_metrics(greedy: Scored) -> dict[str, float]:
  """Of the baseline's episodes, which are counted nowhere else."""
  valid = greedy.valid
  mean = lambda values: float(values[valid].mean()) if valid.any() else 0.0
  return {
      'episode/greedy_episodes': float(len(greedy.episodes)),
      'episode/greedy_failed': float((~valid).sum()),
      'episode/greedy_return': mean(greedy.returns),
      'episode/greedy_accuracy': mean(greedy.accuracy),
  }
