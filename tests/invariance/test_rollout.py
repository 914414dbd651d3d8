"""Two levels of exactness: bitwise under timing, tokens equal over shapes."""

import dataclasses

import numpy as np
import pytest

from agent_rl_jax.rollout.slots import Purpose
from tests import toys


def _play(options=toys.OPTIONS, env=None, part=None, order=None, **kwargs):
  engine, params = toys.engine(options, env, part)
  requests = toys.requests(**kwargs)
  if order is not None:
    requests = [requests[i] for i in order]
  episodes, _ = engine.rollout(params, requests, purpose=Purpose.TRAIN)
  return episodes


@pytest.fixture(scope='module')
def reference():
  return _play()


def test_the_toy_exercises_every_path(reference):
  turns = [len(e.turns) for e in reference]
  seen = [
      t.observation_stop - t.action_stop for e in reference for t in e.turns
  ]
  assert min(turns) == 1 and max(turns) == 3
  assert any(0 < n <= toys.OPTIONS.forced_limit for n in seen)
  assert any(n > toys.OPTIONS.extend_block for n in seen)
  assert len({e.status for e in reference}) >= 3


def test_mask_covers_exactly_the_sampled_tokens(reference):
  for episode in reference:
    row = episode.rows[0]
    expected = np.zeros(len(row.tokens), bool)
    for turn in episode.turns:
      expected[turn.action_start : turn.action_stop] = True
      if turn.finish == 'stop':
        assert row.tokens[turn.action_stop - 1] in toys.STOPS
    np.testing.assert_array_equal(row.action_mask, expected)
    assert (row.logprobs[~row.action_mask] == 0).all()
    assert (row.logprobs[row.action_mask] < 0).all()


@pytest.mark.parametrize('seed', [0, 1])
def test_tool_delays_and_order_change_no_bit(reference, seed):
  order = np.random.default_rng(seed).permutation(len(reference))
  env = toys.ToyEnv(delay=0.03, seed=seed)
  episodes = _play(env=env, order=order)
  assert toys.fingerprint(episodes) == toys.fingerprint(reference)


@pytest.mark.parametrize(
    'change',
    [
        {'slots': 2},
        {'slots': 15},
        {'chunk': 1},
        {'chunk': 32},
        {'extend_rows': 1},
        {'extend_block': 3},
        {'forced_limit': 0},
        {'forced_limit': 40},
    ],
    ids=str,
)
def test_shapes_change_no_token(reference, change):
  options = dataclasses.replace(toys.OPTIONS, **change)
  _assert_close(_play(options), reference)


@pytest.mark.parametrize('data,tensor', [(4, 1), (2, 2), (1, 2)])
def test_meshes_change_no_token(reference, data, tensor):
  part = toys.partition(data, tensor)
  _assert_close(_play(part=part), reference)


def test_purpose_and_episode_name_the_randomness(reference):
  engine, params = toys.engine()
  other, _ = engine.rollout(params, toys.requests(), purpose=Purpose.EVAL)
  assert toys.fingerprint(other, False) != toys.fingerprint(reference, False)
  later, _ = engine.rollout(
      params, toys.requests(first=100), purpose=Purpose.TRAIN
  )
  assert [e.rows[0].tokens.tobytes() for e in later] != [
      e.rows[0].tokens.tobytes() for e in reference
  ]


def test_greedy_members_of_a_group_are_equal():
  engine, params = toys.engine()
  requests = [dataclasses.replace(r, uid=0) for r in toys.requests()]
  episodes, _ = engine.rollout(
      params, requests, purpose=Purpose.EVAL, temperature=0.0
  )
  for i in range(0, len(episodes), 3):
    rows = {e.rows[0].tokens.tobytes() for e in episodes[i : i + 3]}
    assert len(rows) == 1


def _assert_close(episodes, reference):
  """Equal tokens, log-probs within 1e-5 (float32)."""
  ours = toys.fingerprint(episodes, with_logprobs=False)
  assert ours == toys.fingerprint(reference, with_logprobs=False)
  for a, b in zip(episodes, reference, strict=True):
    np.testing.assert_allclose(
        a.rows[0].logprobs, b.rows[0].logprobs, atol=1e-5
    )
