"""Scoring: teacher-forced log-probs and values under given weights.

The old log-probs (policy before its updates) and the reference's come from
one compiled function of the parameters; with a critic, the old log-probs and
the values come from another.  Leaves out what is made of them.  Invariant:
temperature divides the logits here as it did in sampling, so on equal weights
these are the sampler's log-probs up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agent_rl_jax.batch import Extreme, Mean, Scores, TrajectoryBatch
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.logprobs import token_logprobs
from agent_rl_jax.models.value import logprobs_and_values, token_values
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.train.state import TrainState

Array = jax.Array
# (params, tokens_BxT, length_B, num_micro) -> logprobs_BxT
ScoreStep = Callable[[Any, Array, Array, Array], Array]
# (trainable, tokens_BxT, length_B, num_micro) -> (values_BxT, logprobs | None)
ValueStep = Callable[[Any, Array, Array, Array], tuple[Array, Array | None]]


def _by_micro_batch(
    one: Callable[[Array, Array, Array], Any],
    tokens_BxT: Array,
    length_B: Array,
    num_micro: Array,
    micro_batch: int,
    part: Partition,
) -> Any:
  """Tree of [B, T] from `one(tokens, positions, segment)` -> tree of [b, T].

  Rows are taken `micro_batch` at a time, `num_micro` times; later ones get 0.
  """
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
    got = one(tokens[i], place, segment)
    return jax.tree.map(lambda o, g: o.at[i].set(g), out, got)

  def begin(x):
    out = jnp.zeros((count, *x.shape), x.dtype)
    return part.constrain(out, None, 'batch', None)

  out = jax.tree.map(begin, jax.eval_shape(one, tokens[0], place, place))
  out = jax.lax.fori_loop(0, jnp.minimum(num_micro, count), body, out)
  join = lambda x: x.reshape(count * micro_batch, length)[:rows]
  return jax.tree.map(join, out)


def _compiled(fn: Callable[..., Any], part: Partition) -> Any:
  if part.mesh is None:
    return jax.jit(fn)
  return jax.jit(fn, out_shardings=part.sharding('batch', None))


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
    def one(*place):
      return token_logprobs(config, params, *place, temperature, part)[0]

    return _by_micro_batch(
        one, tokens_BxT, length_B, num_micro, micro_batch, part
    )

  return _compiled(score, part)


def make_value_step(
    config: ModelConfig,
    *,
    micro_batch: int,
    logprobs: bool,
    temperature: float = 1.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> ValueStep:
  """Compiled `(trainable, tokens_BxT, length_B, num_micro) -> (values, ...)`.

  As `make_score_step`, for a state with a critic.

  Args:
    config: Shape of the policy.
    micro_batch: Rows of one forward pass.
    logprobs: Whether to give the policy's log-probs too, from the same pass
      when the critic shares its trunk; None stands for them otherwise.
    temperature: That of the sampling.
    part: Mesh and rules.
  """

  def score(trainable, tokens_BxT, length_B, num_micro):
    def one(*place):
      if not logprobs:
        return token_values(config, trainable, *place, part), None
      chosen, _, values = logprobs_and_values(
          config, trainable, *place, temperature, part=part
      )
      return values, chosen

    return _by_micro_batch(
        one, tokens_BxT, length_B, num_micro, micro_batch, part
    )

  return _compiled(score, part)


def score_batch(
    step: ScoreStep,
    state: TrainState,
    batch: TrajectoryBatch,
    num_micro: Array,
    recompute: bool = True,
    value_step: ValueStep | None = None,
) -> Scores:
  """Scores a batch: old log-probs, values if the state has a critic, and the

  reference's log-probs if it has a reference.

  Args:
    step: From `make_score_step`.
    state: Its policy is the old one, its frozen policy the reference.
    batch: Real rows first.
    num_micro: int32 scalar, micro-batches that hold the real rows.
    recompute: False takes the sampler's own log-probs as the old ones.
    value_step: From `make_value_step(logprobs=recompute)`, with a critic.
  """
  rows = (batch.tokens, batch.length, num_micro)
  run = lambda params: step(params, *rows)
  values, old = None, None
  if value_step is not None:
    values, old = value_step(state.trainable, *rows)
  elif recompute:
    old = run(state.trainable['policy'])
  return Scores(
      old_logprobs=old if recompute else batch.sampler_logprobs,
      reference_logprobs=None
      if state.frozen is None
      else run(state.frozen['policy']),
      values=values,
  )


def gap_metrics(
    name: str, gap: Array, mask: Array
) -> dict[str, Mean | Extreme]:
  """The mean of `gap` where `mask` is True, and as `name`_max its maximum."""
  return {
      name: Mean(
          jnp.sum(jnp.where(mask, gap, 0.0)), jnp.sum(mask, dtype=jnp.float32)
      ),
      f'{name}_max': Extreme(jnp.max(jnp.where(mask, gap, -jnp.inf))),
  }


@jax.jit
def logprob_gap(
    batch: TrajectoryBatch, old_logprobs_BxT: Array
) -> dict[str, Mean | Extreme]:
  """|trainer - sampler| log-prob of sampled tokens, both at equal weights.

  Rows that do not enter statistics are left out.  Without any other row the
  mean has count 0 and the maximum is of nothing: the caller leaves both out,
  for they would read as 0, perfect agreement.
  """
  mask = batch.action_mask & batch.valid[:, None]
  gap = jnp.abs(old_logprobs_BxT - batch.sampler_logprobs)
  return gap_metrics('policy/logprob_gap', gap, mask)
