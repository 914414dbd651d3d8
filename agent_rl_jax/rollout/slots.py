"""Device state of a rollout: one row per slot, and the host's edits to it.

A row holds `length` tokens of which `cached` are in the cache; it is runnable
when it is RUNNING, and samples when cached == length - 1.  The host changes
rows only through `edit`, which is elementwise over slots: it compiles once
per write width and needs no communication.  Invariant: tokens before `cached`
never change.
"""

from __future__ import annotations

import enum

import flax
import jax
import jax.numpy as jnp
import numpy as np

from agent_rl_jax.models import cache as cache_lib
from agent_rl_jax.models.config import ModelConfig

Array = jax.Array


class SlotStatus(enum.IntEnum):
  FREE = 0  # no episode, or parked: never computed on purpose
  RUNNING = 1  # decodes
  STOPPED = 2  # its action matched a stop
  EXHAUSTED = 3  # its action ran out of budget or row


class Purpose(enum.IntEnum):
  """Names the randomness of a rollout; never changes what is sampled else."""

  TRAIN = 0
  EVAL = 1
  PLAY = 2
  GREEDY = 3  # a baseline's episode, beside the sampled ones of its group


@flax.struct.dataclass
class Slots:
  """B rows of T tokens.

  Attributes:
    tokens: int32 [B, T].
    length: int32 [B], tokens in the row.
    cached: int32 [B], tokens whose keys and values are in the cache.
    budget: int32 [B], tokens the current action may still sample.
    status: int32 [B], a SlotStatus.
    match: int32 [B], state of the stop automaton.
    key: uint32 [B, 2], key data of (run, purpose, episode, row).
    temperature: float32 [B].
    cache: Layout private to models/cache.py.
  """

  tokens: Array
  length: Array
  cached: Array
  budget: Array
  status: Array
  match: Array
  key: Array
  temperature: Array
  cache: cache_lib.Cache


@flax.struct.dataclass
class Edit:
  """What the host does to rows before the next chunk; W the write width.

  Attributes:
    touch: bool [B], rows that change at all.
    fresh: bool [B], rows that a new episode takes over.
    start: int32 [B], where the written tokens begin; below `length` this
      truncates the row first.
    count: int32 [B], tokens written.
    tokens: int32 [B, W].
    status: int32 [B], status afterwards.
    budget: int32 [B], budget of the next action.
    name: uint32 [B, 3], (purpose, episode, row) of a fresh row.
    temperature: float32 [B].
  """

  touch: Array
  fresh: Array
  start: Array
  count: Array
  tokens: Array
  status: Array
  budget: Array
  name: Array
  temperature: Array


def empty_edit(batch: int, width: int) -> Edit:
  """An edit that changes nothing, in host memory, to be filled in."""
  return Edit(
      touch=np.zeros(batch, bool),
      fresh=np.zeros(batch, bool),
      start=np.zeros(batch, np.int32),
      count=np.zeros(batch, np.int32),
      tokens=np.zeros((batch, width), np.int32),
      status=np.zeros(batch, np.int32),
      budget=np.zeros(batch, np.int32),
      name=np.zeros((batch, 3), np.uint32),
      temperature=np.zeros(batch, np.float32),
  )


def init(config: ModelConfig, batch: int, length: int) -> Slots:
  """Free slots."""
  return Slots(
      tokens=jnp.zeros((batch, length), jnp.int32),
      length=jnp.zeros(batch, jnp.int32),
      cached=jnp.zeros(batch, jnp.int32),
      budget=jnp.zeros(batch, jnp.int32),
      status=jnp.zeros(batch, jnp.int32),
      match=jnp.zeros(batch, jnp.int32),
      key=jnp.zeros((batch, 2), jnp.uint32),
      temperature=jnp.ones(batch, jnp.float32),
      cache=cache_lib.init(config, batch, length),
  )


def axes(config: ModelConfig) -> Slots:
  """Logical axis names of each field."""
  return Slots(
      tokens=('batch', None),
      length=('batch',),
      cached=('batch',),
      budget=('batch',),
      status=('batch',),
      match=('batch',),
      key=('batch', None),
      temperature=('batch',),
      cache=cache_lib.axes(config),
  )


def edit_axes() -> Edit:
  return Edit(
      touch=('batch',),
      fresh=('batch',),
      start=('batch',),
      count=('batch',),
      tokens=('batch', None),
      status=('batch',),
      budget=('batch',),
      name=('batch', None),
      temperature=('batch',),
  )


def edit(slots: Slots, change: Edit, seed: int) -> Slots:
  """Applies host edits: admits, appends, truncates, releases."""
  length = slots.tokens.shape[1]
  width = change.tokens.shape[1]
  column = jnp.arange(length)[None]
  offset = column - change.start[:, None]
  written = (
      change.touch[:, None] & (offset >= 0) & (offset < change.count[:, None])
  )
  new = jnp.take_along_axis(
      change.tokens, jnp.clip(offset, 0, width - 1), axis=1
  )
  touch, fresh = change.touch, change.touch & change.fresh
  new_length = change.start + change.count
  # What stood before `start` stays valid; a fresh row has nothing cached.
  kept = jnp.minimum(slots.cached, jnp.minimum(change.start, new_length - 1))
  kept = jnp.maximum(jnp.where(fresh, 0, kept), 0)
  keys = jax.vmap(_row_key, in_axes=(None, 0))(seed, change.name)
  return slots.replace(
      tokens=jnp.where(written, new, slots.tokens),
      length=jnp.where(touch, new_length, slots.length),
      cached=jnp.where(touch, kept, slots.cached),
      budget=jnp.where(touch, change.budget, slots.budget),
      status=jnp.where(touch, change.status, slots.status),
      match=jnp.where(touch, 0, slots.match),
      key=jnp.where(fresh[:, None], keys, slots.key),
      temperature=jnp.where(fresh, change.temperature, slots.temperature),
  )


def _row_key(seed: int, name_3: Array) -> Array:
  """Key data of (run, purpose, episode, row)."""
  key = jax.random.key(seed)
  for part in (0, 1, 2):
    key = jax.random.fold_in(key, name_3[part])
  return jax.random.key_data(key)
