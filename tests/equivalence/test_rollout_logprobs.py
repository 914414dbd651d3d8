"""Sampling and training share one policy: their log-probs agree."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.models import attention, policy
from agent_rl_jax.models import cache as cache_lib
from agent_rl_jax.models.logprobs import num_pieces, token_logprobs
from agent_rl_jax.rollout.slots import Purpose
from tests import toys


def _teacher_forced(episode, temperature=1.0):
  row = episode.rows[0]
  tokens = row.tokens[None]
  place = np.arange(tokens.shape[1], dtype=np.int32)[None]
  logprobs, _ = token_logprobs(
      toys.CONFIG,
      toys.params(),
      tokens,
      place,
      np.ones_like(tokens),
      temperature,
  )
  return np.asarray(logprobs)[0]


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_sampler_logprobs_are_the_trainers(temperature):
  engine, params = toys.engine()
  episodes, _ = engine.rollout(
      params,
      toys.requests(count=4, samples=1),
      purpose=Purpose.TRAIN,
      temperature=temperature,
  )
  assert sum(e.num_action_tokens for e in episodes) > 20
  for episode in episodes:
    row = episode.rows[0]
    expected = np.where(
        row.action_mask, _teacher_forced(episode, temperature), 0
    )
    np.testing.assert_allclose(row.logprobs, expected, atol=1e-5)


def test_cached_decoding_is_the_full_forward():
  config = toys.CONFIG
  params = policy.unstack(toys.params())
  tokens = jax.random.randint(jax.random.key(1), (3, 17), 0, toys.VOCAB)
  place = jnp.broadcast_to(jnp.arange(17)[None], (3, 17))
  full = policy.hidden(config, params, tokens, place, jnp.ones_like(tokens))
  part = toys.partition()
  cache = cache_lib.init(config, 3, 24)
  # Nine tokens by prefill, the rest one by one.
  cache = cache_lib.extend_rows(
      config,
      params,
      cache,
      jnp.arange(3),
      tokens[:, :9],
      jnp.zeros(3, jnp.int32),
      part,
  )
  for t in range(9, 17):
    out, cache = cache_lib.decode_step(
        config, params, cache, tokens[:, t], jnp.full(3, t), part
    )
    np.testing.assert_allclose(out[:, 0], full[:, t], atol=2e-5)


@pytest.mark.parametrize(
    'change',
    [{}, {'num_kv_heads': 4}, {'qkv_bias': True}, {'tied_head': True}],
    ids=str,
)
def test_scanned_stack_is_the_unrolled_one(change):
  config = dataclasses.replace(toys.CONFIG, **change)
  params = (
      toys.params(toys.CONFIG)
      if not change
      else policy.init(config, jax.random.key(0))
  )
  tokens = jax.random.randint(jax.random.key(1), (2, 13), 0, toys.VOCAB)
  place = jnp.broadcast_to(jnp.arange(13)[None], (2, 13))
  segment = jnp.asarray([[1] * 13, [1] * 6 + [2] * 5 + [0] * 2])
  run = lambda p, c: token_logprobs(c, p, tokens, place, segment)
  scanned = run(params, config)
  for got in (
      run(policy.unstack(params), config),
      run(params, dataclasses.replace(config, remat=True)),
  ):
    for a, b in zip(got, scanned, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)


def test_head_in_pieces_gives_the_same_values_and_gradients():
  config = dataclasses.replace(toys.CONFIG, vocab_size=20_000)
  whole = dataclasses.replace(config, head_megabytes=1000)
  pieces = dataclasses.replace(config, head_megabytes=1)
  assert num_pieces(whole, 4, 24) == 1
  assert num_pieces(pieces, 4, 24) == 8
  params = policy.init(config, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (4, 24), 0, 20_000)
  place = jnp.broadcast_to(jnp.arange(24)[None], (4, 24))

  def loss(params, config):
    logprobs, entropy = token_logprobs(
        config, params, tokens, place, jnp.ones_like(tokens)
    )
    return logprobs.sum() + 0.1 * entropy.sum()

  a = jax.value_and_grad(loss)(params, whole)
  b = jax.value_and_grad(loss)(params, pieces)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_a_segment_does_not_see_its_neighbour():
  config, params = toys.CONFIG, toys.params()
  key = jax.random.key(1)
  tokens = jax.random.randint(key, (1, 12), 0, toys.VOCAB)
  other = tokens.at[:, :5].set(3)
  place = jnp.asarray([[*range(5), *range(7)]])
  segment = jnp.asarray([[1] * 5 + [2] * 7])
  alone, _ = token_logprobs(
      config,
      params,
      tokens[:, 5:],
      jnp.arange(7)[None],
      jnp.ones((1, 7), jnp.int32),
  )
  for row in (tokens, other):
    packed, _ = token_logprobs(config, params, row, place, segment)
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-5)
    assert packed[0, 0] == 0 and packed[0, 5] == 0


@pytest.mark.parametrize('t,block', [(700, None), (40, 16), (48, 16)])
def test_long_rows_attend_in_blocks(t, block, monkeypatch):
  if block is not None:
    monkeypatch.setattr(attention, 'QUERY_BLOCK', block)
  assert t > attention.QUERY_BLOCK
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, t, 2, 4))
  k = jax.random.normal(keys[1], (2, t, 1, 4))
  v = jax.random.normal(keys[2], (2, t, 1, 4))
  # Segments end inside blocks and at the row's end; one row has padding.
  segment = np.ones((2, t), np.int32)
  segment[0, t // 3 :] = 2
  segment[1, 3 * t // 4 :] = 2
  segment[1, -t // 10 :] = 0
  seen = (segment > 0)[..., None, None]

  def blocks(q, k, v):
    return attention.segment_attention(q, k, v, jnp.asarray(segment))

  def whole(q, k, v):
    mask = attention.segment_mask(jnp.asarray(segment))
    return attention.attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)

  @functools.partial(jax.jit, static_argnums=0)
  def run(fn, *inputs):
    def loss(*inputs):
      out = jnp.where(seen, fn(*inputs), 0.0)
      return jnp.sin(out).sum(), out

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

  got, expected = run(blocks, q, k, v), run(whole, q, k, v)
  for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize('t', [700, 1500])
def test_no_long_row_makes_its_whole_square_of_scores(t):
  shape = lambda n: jax.ShapeDtypeStruct((1, t, n, 4), jnp.float32)
  jaxpr = jax.make_jaxpr(attention.segment_attention)(
      shape(2), shape(1), shape(1), jax.ShapeDtypeStruct((1, t), jnp.int32)
  )
  sizes = {
      int(size)
      for shape in re.findall(r':\w+\[([0-9,]+)\]', str(jaxpr))
      if (size := np.prod([int(n) for n in shape.split(',')]))
  }
  heads = 2
  assert heads * attention.QUERY_BLOCK * t in sizes  # of one block
  assert max(sizes) <= heads * attention.QUERY_BLOCK * t
