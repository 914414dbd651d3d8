"""The cold start: supervised steps on demonstrations, exercises first.

The same batch and step as RL, with unit advantages and the sft loss.  Leaves
out what demonstrations are (`data/demonstrations.py`).  Invariant: step i
reads the same demonstrations whenever and wherever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch
from agent_rl_jax.data.demonstrations import DemonstrationSource
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.train.optimizer import make_optimizer
from agent_rl_jax.train.parts import Parts
from agent_rl_jax.train.stage import Stage
from agent_rl_jax.train.state import (
    TrainState,
    abstract_state,
    init_state,
    trainable_axes,
)
from agent_rl_jax.train.update import Update

# Sections that the cold start does not read.
_FREE = (
    *config_lib.FREE,
    'algorithm',
    'critic',
    'data',
    'env',
    'filter',
    'optimizer',
    'overlong',
    'replay',
    'rewards',
    'rollout',
    'tools',
    'train',
    'watch',
)

# Updates between checkpoints: they are short beside RL iterations.
_EVERY = 50


def demonstration_batch(
    rows: list[tuple[np.ndarray, np.ndarray]], length: int
) -> TrajectoryBatch:
  """(ids, mask) rows as a batch of unit weight, one group each.

  Raises:
    ValueError: when a row is longer than `length`.
  """
  b = len(rows)
  tokens = np.zeros((b, length), np.int32)
  mask = np.zeros((b, length), bool)
  lengths = np.zeros(b, np.int32)
  for i, (ids, sampled) in enumerate(rows):
    if len(ids) > length:
      raise ValueError(
          f'a demonstration has {len(ids)} tokens, more than sft.pack_len ='
          f' {length}: raise it'
      )
    tokens[i, : len(ids)] = ids
    mask[i, : len(ids)] = sampled
    lengths[i] = len(ids)
  zeros = np.zeros((b, length), np.int32)
  index = np.arange(b, dtype=np.int32)
  return TrajectoryBatch(
      tokens=tokens,
      action_mask=mask,
      length=lengths,
      sampler_logprobs=np.zeros((b, length), np.float32),
      policy_version=zeros,
      turn=zeros,
      episode=index,
      group=index,
      valid=np.ones(b, bool),
      weight=np.ones(b, np.float32),
      components=np.zeros((b, 1), np.float32),
      returns=np.zeros(b, np.float32),
      metric=np.zeros(b, np.float32),
      turn_rewards=np.zeros((b, 1), np.float32),
      anchor=np.full((b, 1), -1, np.int32),
      turn_mask=np.zeros((b, 1), bool),
  )


class ColdStart:
  """Supervised training under one configuration."""

  def __init__(
      self,
      parts: Parts,
      config: Mapping[str, Any],
      compiles: metrics_lib.CompileCounter | None = None,
  ):
    """Makes the stage; `compiles` counts the backend compiles of a run."""
    self.parts = parts
    self.config = config
    self._compiles = compiles
    settings = parts.settings
    self.sft = settings.sft
    self.total = self.sft.exercise_steps + self.sft.steps
    self.tx = make_optimizer(
        settings.sft_optimizer, trainable_axes(parts.model)
    )
    self.update = Update(
        parts.model,
        self.tx,
        LossOptions(loss='sft'),
        rows=self.sft.batch,
        pack_len=self.sft.pack_len,
        micro_batch=self.sft.micro_batch,
        max_grad_norm=settings.sft_optimizer.max_grad_norm,
        part=parts.train_part,
    )
    self._sources = {
        stream: DemonstrationSource(
            stream=stream,
            seed=settings.seed,
            options=settings.demonstrations,
        )
        for stream in ('exercise', 'story')
    }

  def abstract(self) -> TrainState:
    """Shapes and shardings of the state, for restoring."""
    return abstract_state(self.parts.model, self.tx, part=self.parts.train_part)

  def batch(self, step: int) -> TrajectoryBatch:
    """Demonstrations of step `step`."""
    story = step - self.sft.exercise_steps
    stream, place = ('exercise', step) if story < 0 else ('story', story)
    source, first = self._sources[stream], place * self.sft.batch
    chat = self.parts.chat
    rows = [
        chat.demonstration(source[(first + i) % len(source)])
        for i in range(self.sft.batch)
    ]
    return demonstration_batch(rows, max(self.sft.pack_len))

  def run(self) -> Any:
    """Trains, or goes on, to the end; returns the parameters as numpy.

    Raises:
      Interrupted: asked to end; what was done is saved.
    """
    parts, settings = self.parts, self.parts.settings
    stage = Stage(
        settings,
        'cold_start',
        self.total,
        _EVERY,
        {
            **config_lib.continuation(self.config, _FREE),
            'tokenizer': parts.tokenizer.digest,
        },
        parts.stop,
    )
    try:
      found = stage.restore(self.abstract())
      if found is not None:
        state = found[0]
      else:
        state = init_state(
            parts.model,
            self.tx,
            jax.random.key(settings.seed),
            params=parts.params,
            part=parts.train_part,
        )
      if not stage.done:
        state = self._train(stage, state)
      return jax.device_get(state.trainable['policy'])
    finally:
      stage.close()

  def _train(self, stage: Stage, state: Any) -> Any:
    stage.begin()
    put = self.update.put
    shape = (self.sft.batch, max(self.sft.pack_len))
    zeros = put(np.zeros(shape, np.float32))
    scores = Scores(old_logprobs=zeros)
    advantages = Advantages(advantages=put(np.ones(shape, np.float32)))
    watch = metrics_lib.Stopwatch()
    with watch.part('compile_s'):
      first = put(self.batch(stage.step))
      state = self.update.warm_up(state, first, scores, advantages, None)
    stage.seconds['compile'] += watch.take()['time/compile_s']
    chosen = np.ones(self.sft.batch, bool)
    warm = self._compiles.count if self._compiles else 0
    while not stage.done:
      if self.parts.stop.is_set():
        stage.save(state, {}, force=True)
        stage.check_stop()
      with watch.part('step_s'):
        host = self.batch(stage.step)
        state, sums = self.update.run(
            state,
            put(host),
            scores,
            advantages,
            None,
            lengths=host.length,
            weights=host.weight,
            chosen=chosen,
        )
        metrics = metrics_lib.finalize(sums)
      if self._compiles is not None:
        metrics['compile/after_warm_up'] = float(self._compiles.count - warm)
      metrics |= watch.take()
      tokens = int(host.length.sum())
      metrics['time/tokens_per_second'] = tokens / metrics['time/step_s']
      stage.seconds['train'] += metrics['time/step_s']
      stage.log(metrics)
      stage.save(state, {})
    return state
