"""Grouped-query attention over masks; softmax in float32.

One function serves training (packed segments), prefill and decoding; only
the mask and the source of keys and values differ.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

# Above this many query positions the scores are made a block of queries at a
# time, so that memory grows with T and not with T squared.
QUERY_BLOCK = 512


def attention(
    q_BxTxNxH: Array, k_BxKxSxH: Array, v_BxKxSxH: Array, mask_BxTxS: Array
) -> Array:
  """Softmax attention of N query heads over K key/value heads.

  Args:
    q_BxTxNxH: Queries, T of them per row.
    k_BxKxSxH: Keys in the cache's layout.
    v_BxKxSxH: Values likewise.
    mask_BxTxS: True where a query may look.  A query that may look nowhere
      (padding) gets a finite, meaningless output.

  Returns:
    [B, T, N, H] in the type of `q`.
  """
  b, t, n, h = q_BxTxNxH.shape
  kv = k_BxKxSxH.shape[1]
  q = q_BxTxNxH.reshape(b, t, kv, n // kv, h)
  scores = jnp.einsum(
      'btkgh,bksh->bkgts', q, k_BxKxSxH, preferred_element_type=jnp.float32
  )
  scores = scores * (h**-0.5)
  # A large finite value: an all-masked row stays finite, and exp underflows
  # to exactly zero wherever anything is visible.
  scores = jnp.where(mask_BxTxS[:, None, None], scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(v_BxKxSxH.dtype)
  out = jnp.einsum('bkgts,bksh->btkgh', weights, v_BxKxSxH)
  return out.reshape(b, t, n, h).astype(q_BxTxNxH.dtype)


def segment_mask(segment_BxT: Array) -> Array:
  """[B, T, T]: a token sees earlier ones of its own segment; 0 is padding."""
  t = segment_BxT.shape[1]
  same = segment_BxT[:, :, None] == segment_BxT[:, None, :]
  causal = jnp.tril(jnp.ones((t, t), bool))[None]
  return same & causal & (segment_BxT > 0)[:, :, None]


def segment_attention(
    q_BxTxNxH: Array, k_BxTxKxH: Array, v_BxTxKxH: Array, segment_BxT: Array
) -> Array:
  """Causal attention within segments, [B, T, N, H]."""
  k = k_BxTxKxH.swapaxes(1, 2)
  v = v_BxTxKxH.swapaxes(1, 2)
  b, t, n, h = q_BxTxNxH.shape
  if t <= QUERY_BLOCK:
    return attention(q_BxTxNxH, k, v, segment_mask(segment_BxT))
  # The last block is filled up with queries of padding, cut off below.
  more = -t % QUERY_BLOCK
  queries = jnp.pad(q_BxTxNxH, ((0, 0), (0, more), (0, 0), (0, 0)))
  segments = jnp.pad(segment_BxT, ((0, 0), (0, more)))

  @jax.checkpoint
  def block(start):
    q = jax.lax.dynamic_slice_in_dim(queries, start, QUERY_BLOCK, 1)
    rows = jax.lax.dynamic_slice_in_dim(segments, start, QUERY_BLOCK, 1)
    mask = (rows[:, :, None] == segment_BxT[:, None, :]) & (rows > 0)[
        :, :, None
    ]
    place = start + jnp.arange(QUERY_BLOCK)
    mask &= (jnp.arange(t)[None, :] <= place[:, None])[None]
    return attention(q, k, v, mask)

  blocks = jax.lax.map(block, jnp.arange(0, t, QUERY_BLOCK))
  return blocks.swapaxes(0, 1).reshape(b, t + more, n, h)[:, :t]
