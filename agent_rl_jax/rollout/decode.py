"""The compiled functions of a rollout: edit, extend, fork, decode_chunk.

All are pure in (params, slots); the factory jits them with donated slots and
pinned shardings, and `warm_up` compiles every shape there is.  Invariant: a
row's bits depend on its own content only, never on its mates or on timing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.models import cache as cache_lib
from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.rules import Partition
from agent_rl_jax.rollout import slots as slots_lib
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.rollout.sampling import sample
from agent_rl_jax.rollout.slots import Slots, SlotStatus

Array = jax.Array


@flax.struct.dataclass
class Report:
  """What the host reads of a chunk; the slots themselves are donated on.

  Attributes:
    tokens: int32 [B, n], tokens sampled in this chunk, left aligned.
    logprobs: float32 [B, n].
    count: int32 [B], how many.
    length: int32 [B], row lengths afterwards.
    status: int32 [B], afterwards.
    steps: int32 [], forward passes made.
    busy: int32 [], rows that did useful work, summed over the passes.
  """

  tokens: Array
  logprobs: Array
  count: Array
  length: Array
  status: Array
  steps: Array
  busy: Array


def decode_chunk(
    config: ModelConfig,
    params: policy.Params,
    slots: Slots,
    stops_QxV: Array,
    steps: int,
    part: Partition,
) -> tuple[Slots, Report]:
  """Up to `steps` tokens per running row; rows stop alone, early exit.

  A row whose next token is already there (an appended observation) is fed
  that token instead of a sampled one.

  Args:
    config: Shape of the policy.
    params: Rollout parameters, unstacked.
    slots: Device state.
    stops_QxV: Stop automaton, int16; the last state means matched.
    steps: Static bound on forward passes.
    part: Rollout mesh and rules.
  """
  batch, length = slots.tokens.shape
  matched = stops_QxV.shape[0] - 1

  def running(slots):
    return slots.status == SlotStatus.RUNNING

  def step(carry):
    slots, tokens, logprobs, count, done, busy = carry
    active = running(slots)
    position = jnp.minimum(slots.cached, length - 1)
    fed = jnp.take_along_axis(slots.tokens, position[:, None], 1)[:, 0]
    hidden, cache = cache_lib.decode_step(
        config, params, slots.cache, fed, position, part
    )
    logits = policy.logits(config, params, hidden, part)[:, 0]
    drawn, logp = sample(logits, slots.key, position + 1, slots.temperature)

    samples = active & (position + 1 == slots.length)
    column = jnp.arange(length)[None]
    here = samples[:, None] & (column == (position + 1)[:, None])
    slot = samples[:, None] & (jnp.arange(steps)[None] == count[:, None])
    match = stops_QxV[slots.match, drawn].astype(jnp.int32)
    match = jnp.where(samples, match, slots.match)
    budget = slots.budget - samples
    new_length = slots.length + samples
    stopped = samples & (match == matched)
    out = samples & ~stopped & ((budget <= 0) | (new_length >= length))
    status = jnp.where(stopped, SlotStatus.STOPPED, slots.status)
    status = jnp.where(out, SlotStatus.EXHAUSTED, status)
    slots = slots.replace(
        tokens=jnp.where(here, drawn[:, None], slots.tokens),
        length=new_length,
        cached=slots.cached + active,
        budget=budget,
        status=status,
        match=match,
        cache=cache,
    )
    tokens = jnp.where(slot, drawn[:, None], tokens)
    logprobs = jnp.where(slot, logp[:, None], logprobs)
    count = count + samples
    return slots, tokens, logprobs, count, done + 1, busy + active.sum()

  def go_on(carry):
    slots, _, _, _, done, _ = carry
    return (done < steps) & running(slots).any()

  pin = lambda x: part.constrain(x, *('batch', None)[: x.ndim])
  carry = (
      slots,
      pin(jnp.zeros((batch, steps), jnp.int32)),
      pin(jnp.zeros((batch, steps), jnp.float32)),
      pin(jnp.zeros(batch, jnp.int32)),
      jnp.int32(0),
      jnp.int32(0),
  )
  slots, tokens, logprobs, count, done, busy = jax.lax.while_loop(
      go_on, step, carry
  )
  report = Report(
      tokens, logprobs, count, slots.length, slots.status, done, busy
  )
  return slots, report


def extend(
    config: ModelConfig,
    params: policy.Params,
    slots: Slots,
    rows: Array,
    block: int,
    part: Partition,
) -> Slots:
  """Prefills the next block of S tokens of R rows per data shard.

  The last token of a row is left to decoding, so that the first sampled
  token of every action comes from the same program.

  Args:
    config: Shape of the policy.
    params: Rollout parameters, unstacked.
    slots: Device state.
    rows: int32 [shards * R], local rows, -1 for idle lanes.
    block: S, static.
    part: Rollout mesh and rules.
  """
  length = slots.tokens.shape[1]
  gather = functools.partial(cache_lib.gather_rows, rows=rows, part=part)
  row_length = gather(slots.length, axes=('batch',))
  cached = gather(slots.cached, axes=('batch',))
  tokens = gather(slots.tokens, axes=('batch', None))
  # A block never runs over the row's end: it starts earlier and computes a
  # few positions again, a function of the row's content alone.
  starts = jnp.clip(cached, 0, length - block)
  columns = starts[:, None] + jnp.arange(block)[None]
  new = jnp.take_along_axis(tokens, columns, axis=1)
  cache = cache_lib.extend_rows(
      config, params, slots.cache, rows, new, starts, part
  )
  done = jnp.minimum(starts + block, row_length - 1)
  cached = cache_lib.scatter_rows(slots.cached, rows, done, ('batch',), part)
  return slots.replace(cached=cached, cache=cache)


def fork(
    slots: Slots, sources: Array, targets: Array, part: Partition
) -> Slots:
  """Copies cached prefixes between rows of a data shard.

  The target's tokens must be a prefix of the source's; it ends with all but
  its last token cached.  `sources`, `targets`: int32 [shards * R], local.
  """
  cache = cache_lib.copy_rows(slots.cache, sources, targets, part)
  have = cache_lib.gather_rows(slots.cached, sources, ('batch',), part)
  length = cache_lib.gather_rows(slots.length, targets, ('batch',), part)
  cached = cache_lib.scatter_rows(
      slots.cached, targets, jnp.minimum(have, length - 1), ('batch',), part
  )
  return slots.replace(cached=cached, cache=cache)


@dataclasses.dataclass(frozen=True)
class Programs:
  """The jitted functions of one rollout configuration.

  Attributes:
    init: () -> Slots, placed on the rollout mesh.
    edit: (slots, Edit) -> Slots.
    extend: (params, slots, rows) -> Slots.
    fork: (slots, sources, targets) -> Slots.
    decode: (params, slots) -> (Slots, Report).
    widths: Write widths of `edit`, ascending; the last is a whole row.
    shards: Data shards; slots of shard s are [s * B/shards, (s+1) * ...).
  """

  init: Callable[[], Slots]
  edit: Callable[[Slots, slots_lib.Edit], Slots]
  extend: Callable[[policy.Params, Slots, np.ndarray], Slots]
  fork: Callable[[Slots, np.ndarray, np.ndarray], Slots]
  decode: Callable[[policy.Params, Slots], tuple[Slots, Report]]
  widths: tuple[int, ...]
  shards: int
  lanes: int

  def warm_up(self, params: policy.Params) -> None:
    """Compiles and runs every shape once, on free slots."""
    slots = self.init()
    idle = np.full(self.lanes, -1, np.int32)
    batch = slots.length.shape[0]
    for width in self.widths:
      slots = self.edit(slots, slots_lib.empty_edit(batch, width))
    slots = self.extend(params, slots, idle)
    slots = self.fork(slots, idle, idle)
    _, report = self.decode(params, slots)
    jax.block_until_ready(report)


def make_programs(
    config: ModelConfig,
    options: RolloutOptions,
    stops_QxV: np.ndarray,
    seed: int,
    part: Partition,
) -> Programs:
  """Jits the rollout functions for one configuration.

  Args:
    config: Shape of the policy.
    options: Rollout shapes and limits.
    stops_QxV: Stop automaton, int16 [Q, V]; V must be the policy's.
    seed: The run's seed.
    part: Rollout mesh and rules.

  Raises:
    ValueError: when slots do not divide over the data shards, or the
      automaton is of another vocabulary.
  """
  shards = part.size('batch')
  if options.slots % shards:
    raise ValueError(
        f'rollout.slots={options.slots} is not a multiple of the'
        f' {shards} data shards of the rollout mesh'
    )
  if stops_QxV.shape[1] != config.vocab_size:
    raise ValueError(
        f'the stop automaton knows {stops_QxV.shape[1]} tokens, the policy'
        f' {config.vocab_size}: pad or cut the tokenizer vocabulary to match'
    )
  slot_shardings = part.tree(slots_lib.axes(config))
  whole = part.replicated()
  lane = part.sharding('batch')
  with_out = lambda out: {} if part.mesh is None else {'out_shardings': out}

  def place(tree: Any, axes: Any) -> Any:
    if part.mesh is None:
      return tree
    return jax.device_put(tree, part.tree(axes))

  stops = jnp.asarray(stops_QxV)
  if part.mesh is not None:
    stops = jax.device_put(stops, whole)

  init = jax.jit(
      lambda: slots_lib.init(config, options.slots, options.max_len),
      **with_out(slot_shardings),
  )
  edit = jax.jit(
      lambda slots, change: slots_lib.edit(slots, change, seed),
      donate_argnums=0,
      **with_out(slot_shardings),
  )
  extend_fn = jax.jit(
      lambda params, slots, rows: extend(
          config, params, slots, rows, options.extend_block, part
      ),
      donate_argnums=1,
      **with_out(slot_shardings),
  )
  fork_fn = jax.jit(
      lambda slots, sources, targets: fork(slots, sources, targets, part),
      donate_argnums=0,
      **with_out(slot_shardings),
  )
  decode = jax.jit(
      lambda params, slots, stops: decode_chunk(
          config, params, slots, stops, options.chunk, part
      ),
      donate_argnums=1,
      **with_out((slot_shardings, whole)),
  )
  edit_axes = slots_lib.edit_axes()
  lanes = options.extend_rows * shards

  def put_rows(rows: Sequence[int]) -> Array:
    rows = np.asarray(rows, np.int32)
    return jnp.asarray(rows) if lane is None else jax.device_put(rows, lane)

  return Programs(
      init=init,
      edit=lambda slots, change: edit(slots, place(change, edit_axes)),
      extend=lambda params, slots, rows: extend_fn(
          params, slots, put_rows(rows)
      ),
      fork=lambda slots, sources, targets: fork_fn(
          slots, put_rows(sources), put_rows(targets)
      ),
      decode=lambda params, slots: decode(params, slots, stops),
      widths=tuple(sorted({max(options.forced_limit, 1), options.max_len})),
      shards=shards,
      lanes=lanes,
  )
