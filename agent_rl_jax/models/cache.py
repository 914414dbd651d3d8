"""The key/value cache and the two ways of running the policy over it.

One buffer per layer, [B, K, T, H], so that decoding never copies a stacked
cache.  Rows are reached by local index under `shard_map`: a plain
`cache[rows]` would gather the whole cache across chips.  Invariant: entries
at positions >= a row's `cached` are garbage that is finite and masked, and
are overwritten before any query may see them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agent_rl_jax.models import policy
from agent_rl_jax.models.attention import attention
from agent_rl_jax.models.config import DTYPES, ModelConfig
from agent_rl_jax.models.layers import rotary
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array
Cache = list[dict[str, Array]]

CACHE_AXES = ('batch', 'kv_heads', None, None)


def init(config: ModelConfig, batch: int, length: int) -> Cache:
  """Zeroed cache of `batch` rows by `length` positions."""
  shape = (batch, config.num_kv_heads, length, config.head_dim)
  dtype = DTYPES[config.dtype]
  # Separate buffers: donating one array under two names is an error.
  return [
      {'k': jnp.zeros(shape, dtype), 'v': jnp.zeros(shape, dtype)}
      for _ in range(config.num_layers)
  ]


def axes(config: ModelConfig) -> Any:
  """Logical axis names of the cache tree."""
  return [{'k': CACHE_AXES, 'v': CACHE_AXES}] * config.num_layers


def _by_shard(part: Partition, fn, in_axes, out_axes):
  """Runs `fn` on each shard's own rows; plain `fn` without a mesh."""
  if part.mesh is None:
    return fn
  specs = tuple(part.spec(*names) for names in in_axes)
  return jax.shard_map(
      fn, mesh=part.mesh, in_specs=specs, out_specs=part.spec(*out_axes)
  )


def gather_rows(x: Array, rows: Array, axes: tuple, part: Partition) -> Array:
  """Rows `rows` (local to each data shard, clipped) of `x`."""
  fn = lambda x, rows: x[jnp.clip(rows, 0, x.shape[0] - 1)]
  return _by_shard(part, fn, (axes, ('batch',)), axes)(x, rows)


def scatter_rows(
    x: Array, rows: Array, values: Array, axes: tuple, part: Partition
) -> Array:
  """`x` with local rows replaced; negative rows are dropped."""

  def fn(x, rows, values):
    rows = jnp.where(rows < 0, x.shape[0], rows)
    return x.at[rows].set(values, mode='drop')

  return _by_shard(part, fn, (axes, ('batch',), axes), axes)(x, rows, values)


def _write_token(
    buffer: Array, new_BxKxH: Array, positions_B: Array, part: Partition
) -> Array:
  """Writes one position per row in place."""

  def fn(buffer, new, positions):
    rows = jnp.arange(buffer.shape[0])
    return buffer.at[rows, :, positions].set(new, unique_indices=True)

  in_axes = (CACHE_AXES, ('batch', 'kv_heads', None), ('batch',))
  return _by_shard(part, fn, in_axes, CACHE_AXES)(
      buffer, new_BxKxH, positions_B
  )


def decode_step(
    config: ModelConfig,
    params: policy.Params,
    cache: Cache,
    tokens_B: Array,
    positions_B: Array,
    part: Partition,
) -> tuple[Array, Cache]:
  """Feeds one token per row.

  Args:
    config: Shape of the policy.
    params: Parameters in the unstacked layout.
    cache: Its buffers; donated by the caller's jit.
    tokens_B: Token fed to each row.
    positions_B: Where it stands; its key and value are written there.
    part: Rollout mesh and rules.

  Returns:
    (hidden [B, 1, D] after the final norm, cache).
  """
  length = cache[0]['k'].shape[2]
  mask = (jnp.arange(length)[None] <= positions_B[:, None])[:, None]
  x = policy.embed(config, params, tokens_B[:, None], part)
  angles = rotary(positions_B[:, None], config.head_dim, config.rope_theta)
  new_cache = []
  for block_params, layer in zip(params['blocks'], cache, strict=True):

    def attend(q, k, v, layer=layer):
      kept = {
          'k': _write_token(layer['k'], k[:, 0], positions_B, part),
          'v': _write_token(layer['v'], v[:, 0], positions_B, part),
      }
      return attention(q, kept['k'], kept['v'], mask), kept

    x, kept = policy.apply_block(config, block_params, x, angles, attend, part)
    new_cache.append(kept)
  return policy.final_norm(config, params, x), new_cache


def extend_rows(
    config: ModelConfig,
    params: policy.Params,
    cache: Cache,
    rows: Array,
    tokens_RxS: Array,
    starts_R: Array,
    part: Partition,
) -> Cache:
  """Prefills a block of S tokens for R gathered rows per data shard.

  Args:
    config: Shape of the policy.
    params: Parameters in the unstacked layout.
    cache: Buffers of all rows.
    rows: Local row of each lane, negative for a lane that does nothing.
    tokens_RxS: The block's tokens.
    starts_R: Position of the block's first token; starts + S <= T.
    part: Rollout mesh and rules.
  """
  length = cache[0]['k'].shape[2]
  block = tokens_RxS.shape[1]
  positions = starts_R[:, None] + jnp.arange(block)[None]
  mask = jnp.arange(length)[None, None] <= positions[..., None]
  x = policy.embed(config, params, tokens_RxS, part)
  angles = rotary(positions, config.head_dim, config.rope_theta)
  new_cache = []
  for block_params, layer in zip(params['blocks'], cache, strict=True):

    def attend(q, k, v, layer=layer):
      kept = {}
      for name, new in (('k', k), ('v', v)):
        held = gather_rows(layer[name], rows, CACHE_AXES, part)
        write = lambda row, new, start: jax.lax.dynamic_update_slice(
            row, new, (0, start, 0)
        )
        kept[name] = jax.vmap(write)(held, new.swapaxes(1, 2), starts_R)
      return attention(q, kept['k'], kept['v'], mask), kept

    x, kept = policy.apply_block(config, block_params, x, angles, attend, part)
    new_cache.append(
        {
            name: scatter_rows(layer[name], rows, kept[name], CACHE_AXES, part)
            for name in layer
        }
    )
  return new_cache


def copy_rows(
    cache: Cache, sources: Array, targets: Array, part: Partition
) -> Cache:
  """Copies whole rows inside each data shard; negative targets drop."""

  def copy(buffer):
    held = gather_rows(buffer, sources, CACHE_AXES, part)
    return scatter_rows(buffer, targets, held, CACHE_AXES, part)

  return jax.tree.map(copy, cache)
