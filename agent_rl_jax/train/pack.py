"""Packing: a rollout batch's rows laid side by side in fixed-length bins.

The host plans (which row goes into which bin, where), the device gathers, so
the arrays keep one shape whatever the lengths are and only the number of
micro-batches is dynamic.  Leaves out the choice of bin length and what a loss
does with the tokens.  Invariant: weights and denominators are made on whole
rows before packing, so packed and unpacked rows give the same sums; what
stands in a bin's gaps reaches neither loss nor gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import flax
import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.algorithms.aggregate import token_weights
from agent_rl_jax.batch import Advantages, LossBatch, Scores, TrajectoryBatch
from agent_rl_jax.data.named import named_generator
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array


@flax.struct.dataclass
class PackPlan:
  """Where the rows of one mini-batch go; all arrays of fixed shape.

  Attributes:
    bin: int32 [B], bin of each row; -1 for rows that are left out.
    start: int32 [B], the row's first position in its bin.
    chosen: bool [B], rows of the mini-batch.
    own: bool [B], rows that the current policy sampled.
    num_micro: int32 [], micro-batches that hold at least one row.
  """

  bin: Array
  start: Array
  chosen: Array
  own: Array
  num_micro: Array


def max_micro(rows: int, micro_batch: int) -> int:
  """Micro-batches of the worst case: each of `rows` rows in its own bin."""
  return -(-rows // micro_batch)


def bin_length(length_B: np.ndarray, buckets: Sequence[int]) -> int:
  """Smallest of `buckets` that holds the longest row; ValueError if none."""
  longest = int(np.max(length_B, initial=0))
  for bucket in sorted(buckets):
    if longest <= bucket:
      return bucket
  raise ValueError(
      f'a row of {longest} tokens fits none of the bin lengths'
      f' {sorted(buckets)}; raise pack_len or lower the limit on tokens'
  )


def assign_bins(
    length_B: np.ndarray, keep_B: np.ndarray, size: int, packing: bool = True
) -> tuple[np.ndarray, np.ndarray, int]:
  """First-fit decreasing of the kept rows into bins of `size` tokens.

  Args:
    length_B: Tokens of each row.
    keep_B: Rows to place; others get bin -1.
    size: Tokens of a bin.
    packing: False puts each row into a bin of its own, in row order.

  Returns:
    (bin_B, start_B, number of bins).  Equal lengths keep their row order, so
    the result depends on the lengths alone.

  Raises:
    ValueError: when a kept row is longer than a bin.
  """
  length_B = np.asarray(length_B)
  rows = np.flatnonzero(np.asarray(keep_B) & (length_B > 0))
  bins = np.full(length_B.shape, -1, np.int32)
  starts = np.zeros(length_B.shape, np.int32)
  if rows.size and length_B[rows].max() > size:
    worst = rows[np.argmax(length_B[rows])]
    raise ValueError(
        f'row {worst} has {length_B[worst]} tokens and bins hold {size}; raise'
        ' pack_len or lower the limit on tokens of an episode'
    )
  if not packing:
    bins[rows] = np.arange(rows.size)
    return bins, starts, int(rows.size)
  free = np.full(rows.size, size)
  used = 0
  for row in rows[np.argsort(-length_B[rows], kind='stable')]:
    place = int(np.argmax(free >= length_B[row]))
    bins[row], starts[row] = place, size - free[place]
    free[place] -= length_B[row]
    used = max(used, place + 1)
  return bins, starts, used


def plan_pack(
    length_B: np.ndarray,
    weight_B: np.ndarray,
    chosen_B: np.ndarray,
    size: int,
    micro_batch: int,
    num_micro: int,
    packing: bool = True,
    own_B: np.ndarray | None = None,
) -> PackPlan:
  """Plans one mini-batch: `chosen_B` rows into num_micro * micro_batch bins.

  Rows of weight 0 are left out: they would cost a forward pass for nothing.
  `own_B` tells the rows of the current policy, None for all.
  Raises ValueError when the bins do not suffice, which `max_micro` rules out.
  """
  keep = np.asarray(chosen_B) & (np.asarray(weight_B) > 0)
  bins, starts, used = assign_bins(length_B, keep, size, packing)
  if used > num_micro * micro_batch:
    raise ValueError(
        f'{used} bins do not fit {num_micro} micro-batches of {micro_batch}'
        ' rows; plan for max_micro(rows of a mini-batch, micro_batch)'
    )
  return PackPlan(
      bin=bins,
      start=starts,
      chosen=np.asarray(chosen_B, bool),
      own=np.ones(keep.shape, bool) if own_B is None else np.asarray(own_B),
      num_micro=np.int32(-(-used // micro_batch)),
  )


def minibatch_plan(
    groups: np.ndarray,
    epochs: int,
    mini_batches: int,
    seed: int,
    iteration: int,
) -> list[np.ndarray]:
  """Group ids of each update, in order: whole groups, permuted by name.

  Every epoch visits every group once, in a permutation drawn under (seed,
  iteration, epoch).  Sizes differ by at most one group; with fewer groups
  than mini-batches there are fewer updates.
  """
  groups = np.unique(np.asarray(groups))
  updates = []
  for epoch in range(epochs):
    generator = named_generator(seed, 'mini_batches', iteration, epoch)
    order = generator.permutation(groups)
    updates += [
        part for part in np.array_split(order, mini_batches) if part.size
    ]
  return updates


def _sources(
    plan: PackPlan, length_B: Array, bins: int, size: int
) -> tuple[Array, Array, Array, Array]:
  """For each place [bins, size]: row, token in the row, segment, filled.

  Row starts are scattered into the bins; every place then belongs to the last
  start at or before it, if that row reaches so far.
  """
  rows = jnp.arange(plan.bin.shape[0], dtype=jnp.int32)
  # A bin beyond the last drops the row; -1 would wrap around.
  target = jnp.where(plan.bin < 0, bins, plan.bin)
  begins = jnp.full((bins, size), -1, jnp.int32)
  begins = begins.at[target, plan.start].set(rows, mode='drop')
  place = jnp.broadcast_to(
      jnp.arange(size, dtype=jnp.int32)[None], (bins, size)
  )
  last = jax.lax.cummax(jnp.where(begins >= 0, place, -1), axis=1)
  row = jnp.take_along_axis(begins, jnp.maximum(last, 0), axis=1)
  filled = (last >= 0) & (place - last < length_B[jnp.maximum(row, 0)])
  row = jnp.where(filled, row, 0)
  token = jnp.where(filled, place - last, 0)
  segment = jnp.cumsum(begins >= 0, axis=1, dtype=jnp.int32)
  return row, token, jnp.where(filled, segment, 0), filled


def pack(
    plan: PackPlan,
    batch: TrajectoryBatch,
    scores: Scores,
    advantages: Advantages,
    correction_BxT: Array | None = None,
    *,
    size: int,
    micro_batch: int,
    num_micro: int,
    aggregation: str,
    norm_length: float = 0.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> LossBatch:
  """Gathers a mini-batch's rows into a LossBatch [M, b, L].

  Args:
    plan: From `plan_pack` with the same size, micro_batch and num_micro.
    batch: B rows of T tokens.
    scores, advantages: [B, T] each.
    correction_BxT: Weights for a sampler that differs from the trainer.
    size: L, tokens of a bin.
    micro_batch: b, bins of a micro-batch.
    num_micro: M, the static bound on micro-batches.
    aggregation, norm_length: As in `algorithms.aggregate.token_weights`.
    part: Mesh and rules; bins are sharded over the batch axes.
  """
  bins = num_micro * micro_batch
  row, token, segment, filled = _sources(plan, batch.length, bins, size)
  # Rows are named, within their micro-batch, by the place they begin at: a
  # number below b * L, so that a segment sum has a static bound.
  begin = jnp.arange(bins * size, dtype=jnp.int32).reshape(bins, size) - token
  begin = begin % (micro_batch * size)
  inside_BxT = jnp.arange(batch.tokens.shape[1])[None] < batch.length[:, None]
  # The first token of a row has no log-prob: nothing predicts it.
  mask_BxT = batch.action_mask & inside_BxT
  mask_BxT = mask_BxT.at[:, 0].set(False)

  def weights(mask_BxT: Array) -> tuple[Array, Array]:
    return token_weights(
        mask_BxT,
        jnp.where(plan.chosen, batch.weight, 0.0),
        batch.group,
        aggregation,
        norm_length,
    )

  weight_BxT, denominator_BxT = weights(mask_BxT)
  value_weight_BxT = value_denominator_BxT = None
  if advantages.value_mask is not None:
    # Rows and groups have fewer tokens with a value than tokens.
    value_weight_BxT, value_denominator_BxT = weights(
        mask_BxT & advantages.value_mask
    )

  def cut(x: Array) -> Array:
    x = x.reshape(num_micro, micro_batch, size)
    return part.constrain(x, None, 'batch', 'length')

  def lay(x_BxT: Array | None) -> Array | None:
    """[B, T] to [M, b, L], 0 in the gaps."""
    if x_BxT is None:
      return None
    return cut(jnp.where(filled, x_BxT[row, token], jnp.zeros((), x_BxT.dtype)))

  return LossBatch(
      tokens=lay(batch.tokens),
      positions=cut(token),
      segment=cut(segment),
      mask=lay(mask_BxT),
      advantages=lay(advantages.advantages),
      old_logprobs=lay(scores.old_logprobs),
      sampler_logprobs=lay(batch.sampler_logprobs),
      weight=lay(weight_BxT),
      denominator=lay(denominator_BxT),
      correction=lay(correction_BxT),
      row=cut(jnp.where(filled, begin, micro_batch * size - 1)),
      group=cut(jnp.where(filled, batch.group[row], batch.group.shape[0] - 1)),
      reference_logprobs=lay(scores.reference_logprobs),
      value_targets=lay(advantages.value_targets),
      old_values=lay(scores.values),
      value_weight=lay(value_weight_BxT),
      value_denominator=lay(value_denominator_BxT),
      own=cut(filled & plan.own[row]),
  )


def make_pack(
    *,
    size: int,
    micro_batch: int,
    num_micro: int,
    aggregation: str,
    norm_length: float = 0.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Callable[..., LossBatch]:
  """Compiled `pack` of one shape; outputs are pinned to the batch sharding."""
  fn = functools.partial(
      pack,
      size=size,
      micro_batch=micro_batch,
      num_micro=num_micro,
      aggregation=aggregation,
      norm_length=norm_length,
      part=part,
  )
  if part.mesh is None:
    return jax.jit(fn)
  return jax.jit(fn, out_shardings=part.sharding(None, 'batch', 'length'))
