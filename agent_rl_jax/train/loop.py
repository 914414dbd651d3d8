"""BRIDGE: reinforcement learning, one update phase on one screen.

collected batch -> score -> advantages -> packed updates -> metrics.  Leaves
out how a batch is collected (`collect.py`), files and what surrounds an
iteration (`arm.py`).  Invariant: what happens is a function of (state,
carried, batch, iteration); nothing else is remembered between two of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from agent_rl_jax.algorithms import advantages as advantages_lib
from agent_rl_jax.algorithms import corrections, returns, value
from agent_rl_jax.batch import Extreme, Mean, Scores, TrajectoryBatch
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.train.assemble import assemble
from agent_rl_jax.train.collect import Collected
from agent_rl_jax.train.evaluate import Scored
from agent_rl_jax.train.optimizer import make_optimizers
from agent_rl_jax.train.pack import max_micro, minibatch_plan
from agent_rl_jax.train.parts import Parts
from agent_rl_jax.train.score import (
    logprob_gap,
    make_score_step,
    make_value_step,
    score_batch,
)
from agent_rl_jax.train.state import (
    TrainState,
    abstract_state,
    init_state,
    trainable_axes,
)
from agent_rl_jax.train.update import Update

# Of what losses report, told of an iteration's last update by itself too: in
# the first all ratios are one, which dilutes the means over updates.
LAST_UPDATE = (
    'clip_fraction',
    'dual_clip_fraction',
    'approx_kl',
    'ratio_max',
    'ratio_min',
)


@dataclasses.dataclass(frozen=True)
class Iteration:
  """What one iteration leaves for reports.

  Attributes:
    metrics: Of the iteration.
    scored: The episodes that were trained on, in the order of their rows.
    played: The episodes that were sampled in it.
    advantages: float32 [B, T], of `scored`.
  """

  metrics: dict[str, float]
  scored: Scored
  played: Scored
  advantages: np.ndarray


class Trainer:
  """Compiled functions of RL under one configuration, shared by its arms."""

  def __init__(self, parts: Parts):
    settings = parts.settings
    train, algorithm = settings.train, settings.algorithm
    self.parts = parts
    self.train, self.algorithm = train, algorithm
    self.reference = algorithm.kl != 'none'
    self.critic = settings.critic
    optimizers = {'policy': settings.optimizer}
    if self.critic.kind != 'none':
      optimizers['critic'] = settings.critic_optimizer
    self.tx = make_optimizers(
        optimizers, trainable_axes(parts.model, self.critic.kind)
    )
    temperature = settings.rollout.temperature
    self._score = make_score_step(
        parts.model,
        micro_batch=train.micro_batch,
        temperature=temperature,
        part=parts.train_part,
    )
    self._value = None
    if self.critic.kind != 'none':
      self._value = make_value_step(
          parts.model,
          micro_batch=train.micro_batch,
          logprobs=train.old_logprobs == 'recompute',
          temperature=temperature,
          part=parts.train_part,
      )
    groups = -(-train.prompts // train.mini_batches)
    self.update = Update(
        parts.model,
        self.tx,
        algorithm,
        rows=groups * train.samples,
        pack_len=train.pack_len,
        micro_batch=train.micro_batch,
        max_grad_norm=settings.optimizer.max_grad_norm,
        temperature=temperature,
        reference=self.reference,
        critic=self.critic,
        critic_grad_norm=settings.critic_optimizer.max_grad_norm,
        part=parts.train_part,
    )
    self._prepare = jax.jit(
        functools.partial(
            _prepare, algorithm, train.old_logprobs == 'recompute'
        )
    )

  def init(self, params: Any) -> tuple[TrainState, dict]:
    """(train state, estimator state) at step 0, from given parameters."""
    parts = self.parts
    state = init_state(
        parts.model,
        self.tx,
        jax.random.key(parts.settings.seed),
        params=params,
        reference=self.reference,
        critic=self.critic.kind,
        part=parts.train_part,
    )
    return state, self.update.put(advantages_lib.initial_state(self.algorithm))

  def abstract(self) -> tuple[TrainState, dict]:
    """Shapes and shardings of what `init` gives, for restoring."""
    parts = self.parts
    carried = jax.eval_shape(
        lambda: advantages_lib.initial_state(self.algorithm)
    )
    sharding = parts.train_part.replicated()
    if sharding is not None:
      carried = jax.tree.map(
          lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
          carried,
      )
    state = abstract_state(
        parts.model,
        self.tx,
        reference=self.reference,
        critic=self.critic.kind,
        part=parts.train_part,
    )
    return state, carried

  def warm_up(
      self, state: TrainState, carried: dict
  ) -> tuple[TrainState, dict]:
    """Compiles every shape that an iteration or an evaluation can need."""
    parts = self.parts
    parts.engine.warm_up(parts.publish(state.trainable['policy']))
    _, batch = assemble(parts.settings, [], [], fresh=0)
    scores, on_device = self._scores(state, batch)
    advantages, correction, _, _ = self._prepare(on_device, scores, carried)
    if self.train.old_logprobs == 'recompute':
      logprob_gap(on_device, scores.old_logprobs)
    state = self.update.warm_up(
        state,
        on_device,
        scores,
        advantages,
        correction,
        self._kl_coef(carried),
    )
    return state, carried

  def iterate(
      self,
      state: TrainState,
      carried: dict,
      collected: Collected,
      iteration: int,
  ) -> tuple[TrainState, dict, Iteration]:
    """Scores, advantages and updates of one collected batch.

    Args:
      state: Train state; donated.
      carried: Estimator state (running baselines, adaptive coefficients).
      collected: From a Collector.
      iteration: Names permutations; the version of the policy that scores.
    """
    watch = metrics_lib.Stopwatch()
    batch = collected.batch
    with watch.part('update_s'):
      scores, on_device = self._scores(state, batch)
      kl_coef = self._kl_coef(carried)
      advantages, correction, kept, sums = self._prepare(
          on_device, scores, carried
      )
      sums |= self._gap(scores, on_device, batch, iteration)
      state, more = self._updates(
          state, kept, scores, advantages, correction, batch, iteration, kl_coef
      )
      metrics = metrics_lib.finalize(sums | more)
      credited = jax.device_get(advantages.advantages)
    metrics |= collected.metrics | watch.take() | metrics_lib.host_memory()
    trained = trained_tokens(batch) * self.train.epochs
    seconds = metrics['time/rollout_s'] + metrics['time/update_s']
    metrics['time/train_tokens_per_s'] = trained / max(
        metrics['time/update_s'], 1e-9
    )
    sampled = collected.stats.tokens
    metrics['time/tokens_per_second'] = sampled / max(seconds, 1e-9)
    done = Iteration(metrics, collected.scored, collected.played, credited)
    return state, advantages.state, done

  def _gap(
      self,
      scores: Scores,
      on_device: TrajectoryBatch,
      host: TrajectoryBatch,
      iteration: int,
  ) -> dict[str, Mean | Extreme]:
    """How far recomputed log-probs are from the sampler's at equal weights.

    Of this policy's own samples: those of an earlier one are stale.  Nothing
    where the batch has none (surplus, replay), for nothing was measured, and
    with the sampler's own log-probs, whose gap the first update measures.
    """
    own = host.valid & (host.policy_version[:, 0] == iteration)
    if self.train.old_logprobs != 'recompute' or not own.any():
      return {}
    return logprob_gap(
        on_device.replace(valid=self.update.put(own)), scores.old_logprobs
    )

  def _updates(
      self, state, batch, scores, advantages, correction, host, iteration, coef
  ) -> tuple[TrainState, dict[str, Mean | Extreme]]:
    """Epochs of mini-batches of whole groups, in a named permutation.

    Sums and extremes are over all updates; 'last_update/...' is of the last
    that had tokens.
    """
    train = self.train
    total: dict[str, Mean | Extreme] = {}
    last: dict[str, Mean | Extreme] = {}
    groups = np.arange(train.prompts)
    trained = np.unique(host.group[host.weight > 0])
    if self.parts.settings.filter.name != 'none' and trained.size:
      # What a filter left is spread evenly; nothing at all is skipped updates.
      groups = trained
    # Surplus and replayed rows are an earlier policy's.
    own = host.policy_version[:, 0] == iteration
    for chosen in minibatch_plan(
        groups,
        train.epochs,
        train.mini_batches,
        self.parts.settings.seed,
        iteration,
    ):
      rows = np.isin(host.group, chosen) & (host.length > 0)
      state, sums = self.update.run(
          state,
          batch,
          scores,
          advantages,
          correction,
          lengths=host.length,
          weights=host.weight,
          chosen=rows,
          own=own,
          kl_coef=coef,
      )
      sums = jax.device_get(sums)
      gap = {
          name: sums.pop(name)
          for name in ('policy/logprob_gap', 'policy/logprob_gap_max')
          if name in sums
      }
      first = not total and train.old_logprobs == 'sampler'
      if first and gap and gap['policy/logprob_gap'].count:
        # The first update sees the weights that sampled the batch; where none
        # of its rows are this policy's, nothing was measured.
        sums |= gap
      if not last or sums['train/loss'].count:
        last = {
            f'last_update/{name}': sums[f'policy/{name}']
            for name in LAST_UPDATE
            if f'policy/{name}' in sums
        }
      for name, mean in sums.items():
        total[name] = total[name] + mean if name in total else mean
    return state, total | last

  def _scores(
      self, state: TrainState, batch: TrajectoryBatch
  ) -> tuple[Scores, TrajectoryBatch]:
    # Up to the last real row: a failed episode leaves an empty row in between.
    rows = int(np.flatnonzero(batch.length > 0).max(initial=-1)) + 1
    on_device = self.update.put(batch)
    scores = score_batch(
        self._score,
        state,
        on_device,
        self.update.put(np.int32(max_micro(rows, self.train.micro_batch))),
        recompute=self.train.old_logprobs == 'recompute',
        value_step=self._value,
    )
    return scores, on_device

  def _kl_coef(self, carried: dict) -> Any:
    if self.algorithm.kl == 'none' or self.algorithm.kl_placement != 'loss':
      return 0.0
    return returns.kl_coef(carried, self.algorithm)


def trained_tokens(batch: TrajectoryBatch) -> int:
  """Tokens of the rows that one epoch updates on; the others are not run."""
  return int(batch.length[batch.weight > 0].sum())


def _prepare(options, recomputed, batch, scores, carried):
  """Compiled: (advantages, correction, batch without rejected, sums)."""
  result = advantages_lib.estimate(batch, scores, carried, options)
  sums = advantages_lib.group_metrics(batch)
  sums |= advantages_lib.kl_metrics(batch, scores, carried, options)
  fix = corrections.Correction(None, None, {})
  if recomputed:
    # The sampler's own log-probs as the old ones would agree with themselves.
    fix = corrections.correct(batch, scores, options)
    sums |= fix.metrics
  if scores.values is not None:
    sums['value/explained_variance'] = value.explained_variance(
        batch, scores, result
    )
  if fix.keep is not None:
    batch = batch.replace(action_mask=batch.action_mask & fix.keep)
  return result, fix.weight, batch, sums
