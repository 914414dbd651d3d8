"""What each algorithm costs beside GRPO, on a batch of 512 rows x 2048 tokens.

  python -m experiments.bench_algorithms
  python -m experiments.bench_algorithms --parts=losses --rounds=9

Prints Markdown tables.  GRPO and the other take turns (A B A B), so that a
machine that gets busier does not favour one.  Parts: `advantages` is the
compiled estimator alone; `losses` value and gradient with respect to the
log-probs, metrics included; `corrections` weights, rejections and mismatch
metrics; `filters` the choice of groups on the host; `updates` all that follows
a rollout (scores, estimator, packing, one update) for a policy so small, one
layer of width 16, that the algorithm's share shows.
The figures of docs/algorithms.md come from here.
"""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from agent_rl_jax.algorithms import (
    advantages,
    aggregate,
    choices,
    corrections,
    filters,
    losses,
)
from agent_rl_jax.algorithms import options as options_lib
from agent_rl_jax.batch import LossBatch, Scores, TrajectoryBatch
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train.optimizer import OptimizerOptions, make_optimizers
from agent_rl_jax.train.options import CriticOptions
from agent_rl_jax.train.pack import max_micro
from agent_rl_jax.train.score import (
    make_score_step,
    make_value_step,
    score_batch,
)
from agent_rl_jax.train.state import init_state, trainable_axes
from agent_rl_jax.train.update import Update

PARTS = ('advantages', 'losses', 'corrections', 'filters', 'updates')

_PARTS = flags.DEFINE_list('parts', list(PARTS), 'Which tables.')
_ROWS = flags.DEFINE_integer('rows', 512, 'Rows of the batch.')
_LENGTH = flags.DEFINE_integer('length', 2048, 'Tokens of a row.')
_UPDATE_ROWS = flags.DEFINE_integer('update_rows', 512, 'Rows of an update.')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Turns that each side gets.')
_UPDATE_ROUNDS = flags.DEFINE_integer('update_rounds', 3, 'The same, updates.')
_MICRO_BATCH = flags.DEFINE_integer('micro_batch', 4, 'Rows of one pass.')

GROUP, TURNS, VOCAB = 8, 8, 64

# Name -> what it changes.  Estimators without a critic differ by the cost of
# the estimator alone, which has a table of its own.
METHODS = {
    'grpo': {},
    **{
        loss: {'loss': loss}
        for loss in ('gspo', 'cispo', 'sapo', 'gmpo', 'reinforce')
    },
    'old log-probs recomputed': {'recompute': True},
    'tis': {'recompute': True, 'correction': 'tis'},
    'kl k3 to a reference': {'kl': 'k3'},
    'gae, shared critic': {'advantage': 'gae', 'critic': 'shared'},
    'gae, own critic': {'advantage': 'gae', 'critic': 'own'},
    'bi_level_gae, own critic': {'advantage': 'bi_level_gae', 'critic': 'own'},
    'turn_gae, own critic': {'advantage': 'turn_gae', 'critic': 'own'},
}


def batch_of(rows: int, length: int) -> tuple[TrajectoryBatch, Scores]:
  """Random rows of eight turns, half of whose tokens were sampled."""
  rng = np.random.default_rng(0)
  place = np.arange(length)
  turn_T = place * TURNS // length
  mask_T = (place * 2 * TURNS // length) % 2 == 1
  mask = np.broadcast_to(mask_T, (rows, length))
  draw = lambda *shape: rng.standard_normal(shape, np.float32)
  logprobs = lambda: np.where(mask, -np.abs(draw(rows, length)), 0)
  returns = rng.integers(0, 2, rows).astype(np.float32)
  index = np.arange(rows, dtype=np.int32)
  batch = TrajectoryBatch(
      tokens=rng.integers(0, VOCAB, (rows, length), np.int32),
      action_mask=mask,
      length=np.full(rows, length, np.int32),
      sampler_logprobs=logprobs(),
      policy_version=np.zeros((rows, length), np.int32),
      turn=np.broadcast_to(turn_T.astype(np.int32), (rows, length)),
      episode=index,
      group=index // GROUP,
      valid=np.ones(rows, bool),
      weight=np.ones(rows, np.float32),
      components=np.stack([returns, draw(rows)], axis=1),
      returns=returns,
      metric=returns,
      turn_rewards=draw(rows, TURNS),
      anchor=rng.integers(0, 32, (rows, TURNS), np.int32),
      turn_mask=np.ones((rows, TURNS), bool),
      baseline=draw(rows),
  )
  scores = Scores(
      old_logprobs=batch.sampler_logprobs + np.where(mask, 0.01, 0),
      values=draw(rows, length),
  )
  return jax.device_put((batch, scores))


def loss_batch(batch: TrajectoryBatch, options) -> LossBatch:
  """The same rows as a loss reads them, one to a bin."""
  rows, length = batch.tokens.shape
  weight, denominator = aggregate.token_weights(
      batch.action_mask,
      batch.weight,
      batch.group,
      options.aggregation,
      options.norm_length,
  )
  ones = jnp.ones((rows, length), jnp.int32)
  sign = jnp.where(batch.returns > 0.5, 1.0, -1.0)[:, None]
  return LossBatch(
      tokens=batch.tokens,
      positions=ones * jnp.arange(length),
      segment=ones,
      mask=batch.action_mask,
      advantages=sign * ones,
      old_logprobs=batch.sampler_logprobs,
      sampler_logprobs=batch.sampler_logprobs,
      weight=weight,
      row=ones * jnp.arange(rows)[:, None],
      group=ones * batch.group[:, None],
      denominator=denominator,
  )


def compare(
    runs: Mapping[str, Callable[[], object]], baseline: str, rounds: int
) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
  """Yields (name, milliseconds of each round and of the baseline beside it)."""
  jax.block_until_ready(runs[baseline]())
  for name, run in runs.items():
    jax.block_until_ready(run())
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
      for side, work in zip(sides, (run, runs[baseline]), strict=True):
        began = time.perf_counter()
        jax.block_until_ready(work())
        side.append(1e3 * (time.perf_counter() - began))
    yield name, sides


def show(title: str, baseline: str, figures: Iterable) -> None:
  """A table of medians, and of the least, which other work disturbs less."""
  print(f'\n### {title}\n')
  print(f'| Name | median ms | least ms | {baseline}: median | least |')
  print('| --- | --- | --- | --- | --- |', flush=True)
  for name, sides in figures:
    cells = [
        f'{x:.0f}' if x >= 100 else f'{x:.3g}'
        for side in sides
        for x in (median(side), min(side))
    ]
    print(f'| {name} | {" | ".join(cells)} |', flush=True)


def estimators(batch: TrajectoryBatch, scores: Scores) -> dict:
  """Compiled calls of every estimator."""

  def run(name):
    options = options_lib.AdvantageOptions(advantage=name)
    state = advantages.initial_state(options)
    compiled = jax.jit(functools.partial(advantages.estimate, options=options))
    return lambda: compiled(batch, scores, state)

  return {name: run(name) for name in advantages.ADVANTAGES}


def policy_losses(batch: TrajectoryBatch) -> dict:
  """Compiled value and gradient of every loss but that of the cold start."""

  def run(name):
    options = options_lib.LossOptions(loss=name)
    rows = loss_batch(batch, options)
    compiled = jax.jit(
        jax.value_and_grad(
            lambda logprobs, rows: _total(logprobs, rows, options), has_aux=True
        )
    )
    logprobs = batch.sampler_logprobs + 0.05 * batch.action_mask
    return lambda: compiled(logprobs, rows)

  return {name: run(name) for name in losses.LOSSES if name != 'sft'}


def _total(logprobs, rows, options):
  mean, metrics = losses.policy_loss(logprobs, None, rows, options)
  return mean.total, (mean.count, metrics)


def sampler_corrections(batch: TrajectoryBatch, scores: Scores) -> dict:
  """Compiled corrections and rejections; 'none' is the metrics alone."""

  def run(**chosen):
    options = options_lib.CorrectionOptions(**chosen)
    compiled = jax.jit(functools.partial(corrections.correct, options=options))
    return lambda: compiled(batch, scores)

  runs = {name: run(correction=name) for name in choices.CORRECTION_BOUNDS}
  return runs | {
      f'rejection {name}': run(rejection=name)
      for name in choices.REJECTION_BOUNDS
      if name != 'none'
  }


def group_filters(batch: TrajectoryBatch) -> dict:
  """Every filter on the batch's groups, on the host."""
  rewards_GxN = np.asarray(batch.returns, np.float64).reshape(-1, GROUP)

  def run(name):
    options = filters.FilterOptions(name=name)
    return lambda: filters.kept_groups(rewards_GxN, rewards_GxN, options)

  return {name: run(name) for name in filters.FILTERS}


def updates(batch: TrajectoryBatch) -> dict:
  """Scores, estimator and one update of a very small policy, by method."""
  model = ModelConfig(
      vocab_size=VOCAB,
      num_layers=1,
      width=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=16,
      mlp_width=16,
  )
  return {
      name: _update(model, batch, **changes)
      for name, changes in METHODS.items()
  }


def _update(
    model: ModelConfig,
    batch: TrajectoryBatch,
    critic: str = 'none',
    recompute: bool = False,
    **algorithm,
) -> Callable[[], object]:
  """What `loop.Trainer.iterate` does with one mini-batch, without its run."""
  rows, length = batch.tokens.shape
  options = options_lib.AlgorithmOptions(**algorithm)
  chosen = CriticOptions(kind=critic)
  part, reference = Partition(), options.kl != 'none'
  axes = trainable_axes(model, critic)
  rate = OptimizerOptions(lr=1e-4)
  tx = make_optimizers(dict.fromkeys(axes, rate), axes)
  size = dict(micro_batch=_MICRO_BATCH.value, part=part)
  score = make_score_step(model, **size)
  value = None
  if critic != 'none':
    value = make_value_step(model, logprobs=recompute, **size)
  update = Update(
      model,
      tx,
      options,
      rows=rows,
      pack_len=(length,),
      max_grad_norm=1.0,
      reference=reference,
      critic=chosen,
      critic_grad_norm=1.0,
      **size,
  )
  num_micro = np.int32(max_micro(rows, _MICRO_BATCH.value))

  def prepare(batch, scores, carried):
    credited = advantages.estimate(batch, scores, carried, options)
    fix = None
    if recompute:  # else the old log-probs are the sampler's: nothing to see
      fix = corrections.correct(batch, scores, options)
    return credited, fix, advantages.group_metrics(batch)

  compiled = jax.jit(prepare)
  carried = advantages.initial_state(options)
  state = [
      init_state(
          model, tx, jax.random.key(0), reference=reference, critic=critic
      )
  ]
  host = np.asarray(batch.length), np.ones(rows, np.float32)

  def once():
    scores = score_batch(score, state[0], batch, num_micro, recompute, value)
    credited, fix, _ = compiled(batch, scores, carried)
    state[0], metrics = update.run(
        state[0],
        batch,
        scores,
        credited,
        fix.weight if fix else None,
        lengths=host[0],
        weights=host[1],
        chosen=np.ones(rows, bool),
        kl_coef=options.kl_coef,
    )
    return metrics

  return once


def main(argv):
  del argv
  unknown = set(_PARTS.value) - set(PARTS)
  if unknown:
    raise app.UsageError(f'--parts={sorted(unknown)}: some of {PARTS}')
  rows, length = _ROWS.value, _LENGTH.value
  rounds = _ROUNDS.value
  batch, scores = batch_of(rows, length)
  load = os.getloadavg()[0]
  print(
      f'{rows} rows x {length} tokens, {rounds} rounds, {os.cpu_count()}'
      f' cores, {jax.devices()[0].device_kind}, load {load:.1f} at the start'
  )
  if 'advantages' in _PARTS.value:
    figures = compare(estimators(batch, scores), 'grpo', rounds)
    show('Advantage estimators', 'grpo', figures)
  if 'losses' in _PARTS.value:
    figures = compare(policy_losses(batch), 'ppo_clip', rounds)
    show('Policy losses with their gradient', 'ppo_clip', figures)
  if 'corrections' in _PARTS.value:
    figures = compare(sampler_corrections(batch, scores), 'none', rounds)
    show('Corrections and rejections', 'none', figures)
  if 'filters' in _PARTS.value:
    figures = compare(group_filters(batch), 'none', rounds)
    show('Filters', 'none', figures)
  if 'updates' in _PARTS.value:
    few, _ = batch_of(_UPDATE_ROWS.value, length)
    figures = compare(updates(few), 'grpo', _UPDATE_ROUNDS.value)
    show(f'Whole updates on {_UPDATE_ROWS.value} rows', 'grpo', figures)


if __name__ == '__main__':
  app.run(main)
