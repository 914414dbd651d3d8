"""Golden cases of the algorithms: reading, resolving, and building batches.

`claim` hands a test its cases by name and remembers them, so that one test can
ask whether every case of the file is used.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib

import jax.numpy as jnp
import numpy as np

from agent_rl_jax.algorithms.aggregate import token_weights
from agent_rl_jax.batch import LossBatch, Scores, TrajectoryBatch

_FILE = json.loads(
    pathlib.Path(__file__).with_name('algorithms.json').read_text()
)
INPUTS = _FILE['inputs']
CASES = {case['name']: case for case in _FILE['cases']}
CLAIMED = set()


def claim(*patterns: str) -> list[str]:
  """Names that match any pattern, in file order; each must match something."""
  names = []
  for pattern in patterns:
    found = [name for name in CASES if fnmatch.fnmatchcase(name, pattern)]
    assert found, pattern
    names += [name for name in found if name not in names]
  CLAIMED.update(names)
  return names


def number(x):
  """Nested lists to float64, 'nan' and 'inf' strings included."""
  return np.array(x, dtype=np.float64)


def resolve(name: str, key: str):
  """An input of a case, following references to batches and other cases."""
  case = CASES[name]
  value = case['inputs'][key]
  if not isinstance(value, str):
    return value
  if value.startswith('case '):
    _, other, field = value.split()
    source = CASES[other]
    if field in source['outputs']:
      return source['outputs'][field]
    return resolve(other, field)
  batch, _, field = value.rpartition('.')
  return INPUTS[batch or case['inputs'].get('batch', '')][field]


def field(name: str, key: str):
  """A field of the case's batch."""
  return INPUTS[CASES[name]['inputs']['batch']][key]


def dense(ids) -> np.ndarray:
  """Ids 0, 1, ... by first appearance."""
  seen = {}
  return np.array([seen.setdefault(i, len(seen)) for i in ids], np.int32)


def turns_of(mask_BxT: np.ndarray) -> np.ndarray:
  """Turn index of each token: a turn is a run of the mask and what follows."""
  starts = np.diff(mask_BxT.astype(int), axis=1, prepend=0) == 1
  return np.maximum(np.cumsum(starts, axis=1) - 1, 0).astype(np.int32)


def trajectories(
    mask,
    rewards=None,
    returns=None,
    group=None,
    dtype=jnp.float64,
    components=None,
    baseline=None,
    sampler_logprobs=None,
) -> TrajectoryBatch:
  """A batch of one row per episode; token rewards must be on turn ends."""
  mask = np.array(mask) > 0
  rows, length = mask.shape
  turn = turns_of(mask)
  turns = int(turn.max()) + 1
  turn_rewards = np.zeros((rows, turns))
  turn_mask = np.zeros((rows, turns), bool)
  for row in range(rows):
    for token in range(length):
      if mask[row, token]:
        turn_mask[row, turn[row, token]] = True
        if rewards is not None:
          turn_rewards[row, turn[row, token]] += rewards[row][token]
  if returns is None:
    returns = number(rewards).sum(axis=1)
  real = lambda x: None if x is None else jnp.asarray(number(x), dtype)
  zeros = np.zeros((rows, length))
  return TrajectoryBatch(
      tokens=jnp.zeros((rows, length), jnp.int32),
      action_mask=jnp.asarray(mask),
      length=jnp.full((rows,), length, jnp.int32),
      sampler_logprobs=real(
          zeros if sampler_logprobs is None else sampler_logprobs
      ),
      policy_version=jnp.zeros((rows, length), jnp.int32),
      turn=jnp.asarray(turn),
      episode=jnp.arange(rows, dtype=jnp.int32),
      group=jnp.asarray(
          np.zeros(rows, np.int32) if group is None else dense(group)
      ),
      valid=jnp.ones((rows,), bool),
      weight=jnp.ones((rows,), dtype),
      components=real(
          np.array(returns)[:, None] if components is None else components
      ),
      returns=real(returns),
      metric=real(returns),
      turn_rewards=real(turn_rewards),
      anchor=jnp.full((rows, turns), -1, jnp.int32),
      turn_mask=jnp.asarray(turn_mask),
      baseline=real(baseline),
  )


def batch_of(name: str, dtype=jnp.float64, **extra) -> TrajectoryBatch:
  """The case's batch with its token rewards, or outcomes without them."""
  inputs = CASES[name]['inputs']
  key = 'rewards' if 'rewards' in inputs else 'token_level_rewards'
  if key in inputs:
    extra['rewards'] = resolve(name, key)
  else:
    extra['returns'] = resolve(name, 'outcome')
  return trajectories(
      field(name, 'response_mask'),
      group=field(name, 'uid'),
      dtype=dtype,
      **extra,
  )


def scores_of(name: str, dtype=jnp.float64) -> Scores:
  """Old and reference log-probs and values of the case's batch."""
  batch = INPUTS[CASES[name]['inputs']['batch']]
  real = lambda key: (
      jnp.asarray(number(batch[key]), dtype) if key in batch else None
  )
  return Scores(
      old_logprobs=real('old_log_prob'),
      reference_logprobs=real('ref_log_prob'),
      values=real('values'),
  )


def loss_batch(
    mask,
    advantages,
    old_logprobs,
    aggregation='token-mean',
    norm_length=0.0,
    group=None,
    dtype=jnp.float64,
    **extra,
) -> LossBatch:
  """One row per bin, aggregated by `token_weights`."""
  mask = jnp.asarray(np.array(mask) > 0)
  rows, length = mask.shape
  group = np.zeros(rows, np.int32) if group is None else dense(group)
  real = lambda x: jnp.asarray(number(x), dtype)
  weight, denominator = token_weights(
      mask,
      jnp.ones((rows,), dtype),
      jnp.asarray(group),
      aggregation,
      norm_length,
  )
  zeros = jnp.zeros((rows, length), jnp.int32)
  row = jnp.broadcast_to(jnp.arange(rows)[:, None], zeros.shape)
  return LossBatch(
      tokens=zeros,
      positions=zeros,
      segment=zeros + 1,
      mask=mask,
      advantages=real(advantages),
      old_logprobs=real(old_logprobs),
      sampler_logprobs=real(np.zeros(mask.shape)),
      weight=weight,
      denominator=denominator,
      row=row,
      group=jnp.broadcast_to(jnp.asarray(group)[:, None], zeros.shape),
      **{key: real(value) for key, value in extra.items()},
  )


def assert_close(actual, expected, name: str, dtype=jnp.float64, where=None):
  """Compares at the tolerance of the case's and the run's precision."""
  actual = np.array(actual, np.float64)
  expected = number(expected)
  if where is not None:
    actual, expected = (
        actual[where],
        np.broadcast_to(expected, np.shape(where))[where],
    )
  exact = dtype == jnp.float64 and CASES[name]['dtype'] == 'float64'
  # Its temperatures are float32.
  exact = exact and name != 'trl/grpo_loss/sapo'
  tolerance = (
      {'rtol': 2e-7, 'atol': 1e-9} if exact else {'rtol': 2e-5, 'atol': 2e-6}
  )
  np.testing.assert_allclose(actual, expected, **tolerance)
