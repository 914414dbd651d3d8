"""Updates from a batch of rows: bucket, pack, step; for RL and SFT alike.

Holds the compiled functions of one loss and batch shape.  Leaves out where
rows and advantages come from.  Invariant: after `warm_up` nothing compiles,
whatever bucket a batch falls into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import (
    Advantages,
    Extreme,
    Mean,
    Scores,
    TrajectoryBatch,
)
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train import pack as pack_lib
from agent_rl_jax.train.options import CriticOptions
from agent_rl_jax.train.state import TrainState
from agent_rl_jax.train.step import make_train_step

Array = jax.Array


class Update:
  """Optimizer updates on mini-batches of a TrajectoryBatch."""

  def __init__(
      self,
      model: ModelConfig,
      tx: optax.GradientTransformation,
      options: LossOptions,
      *,
      rows: int,
      pack_len: Sequence[int],
      micro_batch: int,
      max_grad_norm: float,
      temperature: float = 1.0,
      reference: bool = False,
      critic: CriticOptions = CriticOptions(),  # noqa: B008 (frozen)
      critic_grad_norm: float = 0.0,
      part: Partition,
  ):
    """Makes the compiled functions.

    Args:
      model: Shape of the policy.
      tx: Optimizer.
      options: The losses.
      rows: Most rows of one mini-batch.
      pack_len: Bin lengths; the shortest that holds a mini-batch is used.
      micro_batch: Bins of one forward and backward pass.
      max_grad_norm: Global-norm clip, 0 for none.
      temperature: Of the sampling.
      reference: Whether the state has a frozen reference.
      critic: Which critic the state has.
      critic_grad_norm: Global-norm clip of its gradient, 0 for none.
      part: Training mesh and rules.
    """
    self._buckets = tuple(sorted(pack_len))
    self._micro_batch = micro_batch
    self._num_micro = pack_lib.max_micro(rows, micro_batch)
    self._pack = {
        size: pack_lib.make_pack(
            size=size,
            micro_batch=micro_batch,
            num_micro=self._num_micro,
            aggregation=options.aggregation,
            norm_length=options.norm_length,
            part=part,
        )
        for size in self._buckets
    }
    self._step = make_train_step(
        model,
        tx,
        options,
        max_grad_norm=max_grad_norm,
        temperature=temperature,
        reference=reference,
        critic=critic,
        critic_grad_norm=critic_grad_norm,
        part=part,
    )
    self._part = part

  def put(self, tree: Any) -> Any:
    """Host arrays onto the devices: whole on each, since rows are gathered

    from all over a batch when they are packed.
    """
    sharding = self._part.replicated()
    if sharding is None:
      return jax.device_put(tree)
    return jax.device_put(tree, sharding)

  def run(
      self,
      state: TrainState,
      batch: TrajectoryBatch,
      scores: Scores,
      advantages: Advantages,
      correction: Array | None,
      *,
      lengths: np.ndarray,
      weights: np.ndarray,
      chosen: np.ndarray,
      own: np.ndarray | None = None,
      kl_coef: Any = 0.0,
  ) -> tuple[TrainState, dict[str, Mean | Extreme]]:
    """One update on the rows that are `chosen`.

    Args:
      state: Donated.
      batch, scores, advantages, correction: On the devices.
      lengths, weights, chosen: [B] host copies that the packing plan needs.
      own: bool [B], rows that the current policy sampled; None for all.
      kl_coef: Coefficient of the KL in the loss.

    Raises:
      ValueError: when a row is longer than every bin.
    """
    used = np.where(chosen & (weights > 0), lengths, 0)
    size = pack_lib.bin_length(used, self._buckets)
    plan = pack_lib.plan_pack(
        lengths,
        weights,
        chosen,
        size,
        self._micro_batch,
        self._num_micro,
        own_B=own,
    )
    plan = self.put(plan)
    packed = self._pack[size](plan, batch, scores, advantages, correction)
    coef = kl_coef
    if not isinstance(coef, jax.Array):
      coef = self.put(np.float32(coef))
    return self._step(state, packed, plan.num_micro, coef)

  def warm_up(
      self,
      state: TrainState,
      batch: TrajectoryBatch,
      scores: Scores,
      advantages: Advantages,
      correction: Array | None,
      kl_coef: Any = 0.0,
  ) -> TrainState:
    """Compiles every bucket; an update without rows changes nothing.

    Returns the state (the one given is donated), its counters as they were.
    """
    rows = batch.length.shape[0]
    counters = jax.device_get((state.step, state.skipped))
    buckets = self._buckets
    for size in buckets:
      self._buckets = (size,)
      state, metrics = self.run(
          state,
          batch,
          scores,
          advantages,
          correction,
          lengths=np.zeros(rows, np.int32),
          weights=np.zeros(rows, np.float32),
          chosen=np.zeros(rows, bool),
          kl_coef=kl_coef,
      )
      jax.block_until_ready(metrics)
    self._buckets = buckets
    step, skipped = self.put(counters)
    return state.replace(step=step, skipped=skipped)
