"""Scoring: teacher-forced log-probs of a rollout batch under given weights.

The old log-probs (policy before its updates) and the reference's come from
one compiled function of the parameters.  Leaves out values.  Invariant:
temperature divides the logits here as it did in sampling, so on equal weights
these are the sampler's log-probs up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agent_rl_jax.batch import Mean, Scores, TrajectoryBatch
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.logprobs import token_logprobs
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train.state import TrainState

Array = jax.Array
# (params, tokens_BxT, length_B, num_micro) -> logprobs_BxT
ScoreStep = Callable[[Any, Array, Array, Array], Array]


def make_score_step(
    config: ModelConfig,
    *,
    micro_batch: int,
    temperature: float = 1.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> ScoreStep:
  """Compiled `(params, tokens_BxT, length_B, num_micro) -> logprobs_BxT`.

  Rows are taken `micro_batch` at a time, `num_micro` (an int32 scalar) times;
  later rows, the first token of a row and what lies beyond `length` get 0.

  Args:
    config: Shape of the policy.
    micro_batch: Rows of one forward pass.
    temperature: That of the sampling.
    part: Mesh and rules.
  """

  def score(params, tokens_BxT, length_B, num_micro):
    rows, length = tokens_BxT.shape
    count = -(-rows // micro_batch)
    pad = count * micro_batch - rows
    cut = lambda x: part.constrain(
        jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(
            count, micro_batch, *x.shape[1:]
        ),
        None,
        'batch',
        *(None,) * (x.ndim - 1),
    )
    tokens, lengths = cut(tokens_BxT), cut(length_B)
    place = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (micro_batch, length)
    )

    def body(i, out):
      segment = (place < lengths[i][:, None]).astype(jnp.int32)
      logprobs, _ = token_logprobs(
          config, params, tokens[i], place, segment, temperature, part
      )
      return out.at[i].set(logprobs)

    out = jnp.zeros((count, micro_batch, length), jnp.float32)
    out = part.constrain(out, None, 'batch', None)
    out = jax.lax.fori_loop(0, jnp.minimum(num_micro, count), body, out)
    return out.reshape(count * micro_batch, length)[:rows]

  if part.mesh is None:
    return jax.jit(score)
  return jax.jit(score, out_shardings=part.sharding('batch', None))


def score_batch(
    step: ScoreStep,
    state: TrainState,
    batch: TrajectoryBatch,
    num_micro: Array,
    recompute: bool = True,
) -> Scores:
  """Scores a batch: old log-probs, and the reference's if the state has one.

  Args:
    step: From `make_score_step`.
    state: Its policy is the old one, its frozen policy the reference.
    batch: Real rows first.
    num_micro: int32 scalar, micro-batches that hold the real rows.
    recompute: False takes the sampler's own log-probs as the old ones.
  """
  run = lambda params: step(params, batch.tokens, batch.length, num_micro)
  return Scores(
      old_logprobs=run(state.trainable['policy'])
      if recompute
      else batch.sampler_logprobs,
      reference_logprobs=None
      if state.frozen is None
      else run(state.frozen['policy']),
  )


@jax.jit
def logprob_gap(
    batch: TrajectoryBatch, old_logprobs_BxT: Array
) -> dict[str, Mean]:
  """|trainer - sampler| log-prob of sampled tokens, both at equal weights.

  Rows that do not enter statistics are left out; the maximum is a Mean of
  count 1.
  """
  mask = batch.action_mask & batch.valid[:, None]
  gap = jnp.abs(old_logprobs_BxT - batch.sampler_logprobs)
  gap = jnp.where(mask, gap, 0.0)
  count = jnp.sum(mask).astype(jnp.float32)
  return {
      'policy/logprob_gap': Mean(jnp.sum(gap), count),
      'policy/logprob_gap_max': Mean(jnp.max(gap), jnp.ones(())),
  }
