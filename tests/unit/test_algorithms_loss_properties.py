"""Losses: gradients, splits, packing, and what may not reach them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent_rl_jax.algorithms import aggregate, losses, value
from agent_rl_jax.algorithms.choices import CLIP_BOUNDS
from agent_rl_jax.algorithms.options import LossOptions
from agent_rl_jax.batch import LossBatch
from tests.algorithm_batches import QUICK

EXAMPLES = settings(max_examples=20, deadline=None, derandomize=True)
ROWS, LENGTH = 6, 8
CLIPS = {'ppo_clip': (0.2, 0.28), 'gspo': (0.05, 0.1), 'gmpo': (0.4, 0.4)}
OPTIONS = {
    name: LossOptions(
        loss=name,
        clip_low=CLIPS.get(name, CLIP_BOUNDS[name])[0],
        clip_high=CLIPS.get(name, CLIP_BOUNDS[name])[1],
        dual_clip=3.0,
        aggregation='seq-mean-token-mean',
        kl='k3',
        kl_coef=0.1,
    )
    for name in losses.LOSSES
}


@pytest.fixture(autouse=True)
def double():
  with jax.enable_x64(True):
    yield


def parts(seed, mask=None, rows=ROWS):
  """Plain rows as numpy: everything off the mask is NaN."""
  rng = np.random.default_rng(seed)
  if mask is None:
    mask = rng.random((rows, LENGTH)) < 0.6
  draw = lambda: np.where(mask, rng.normal(size=mask.shape), np.nan)
  old = draw()
  return {
      'mask': mask,
      'advantages': draw(),
      'old_logprobs': old,
      'reference_logprobs': draw(),
      'logprobs': old + 0.4 * draw(),
      'correction': np.where(mask, rng.uniform(0.5, 2, mask.shape), np.nan),
      'group': rng.integers(0, 3, rows).astype(np.int32),
      'row_weight': np.where(rng.random(rows) < 0.8, 1.0, 0.0),
      'value_targets': draw(),
      'old_values': draw(),
      'values': draw(),
  }


def build(part, mode='seq-mean-token-mean', norm_length=5.0):
  """(logprobs, values, LossBatch), one row per bin."""
  shape = part['mask'].shape
  weight, denominator = aggregate.token_weights(
      jnp.asarray(part['mask']),
      jnp.asarray(part['row_weight']),
      jnp.asarray(part['group']),
      mode,
      norm_length,
  )
  index = np.broadcast_to(np.arange(shape[0])[:, None], shape)
  batch = LossBatch(
      tokens=jnp.zeros(shape, jnp.int32),
      positions=jnp.zeros(shape, jnp.int32),
      segment=jnp.ones(shape, jnp.int32),
      mask=jnp.asarray(part['mask']),
      advantages=jnp.asarray(part['advantages']),
      old_logprobs=jnp.asarray(part['old_logprobs']),
      sampler_logprobs=jnp.zeros(shape),
      weight=weight,
      denominator=denominator,
      row=jnp.asarray(index),
      group=jnp.broadcast_to(jnp.asarray(part['group'])[:, None], shape),
      reference_logprobs=jnp.asarray(part['reference_logprobs']),
      correction=jnp.asarray(part['correction']),
      value_targets=jnp.asarray(part['value_targets']),
      old_values=jnp.asarray(part['old_values']),
  )
  return jnp.asarray(part['logprobs']), jnp.asarray(part['values']), batch


@functools.partial(jax.jit, compiler_options=QUICK)
def every_loss(logprobs, values, batch):
  """{loss: (Mean, d total / d input, metrics)}, the value loss with them."""
  result = {}
  for name, options in OPTIONS.items():

    def total(x, options=options):
      mean, metrics = losses.policy_loss(x, None, batch, options)
      return mean.total, (mean, metrics)

    (_, (mean, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(
        logprobs
    )
    result[name] = mean, gradient, metrics

  def total(x):
    mean, metrics = value.value_loss(x, batch, OPTIONS['ppo_clip'])
    return mean.total, (mean, metrics)

  (_, (mean, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(
      values
  )
  result['value'] = mean, gradient, metrics
  return result


def test_finite_differences():
  """In float64, where the gradient is that of the value.

  cispo detaches its ratio, and gspo's token gradient is the row's only for
  advantages and corrections that are constant on a row.
  """
  part = parts(0)
  rng = np.random.default_rng(1)
  part['advantages'] = np.where(
      part['mask'], rng.normal(size=(ROWS, 1)), np.nan
  )
  part['correction'][:] = 1.5
  part['row_weight'][:] = 1
  logprobs, values, batch = build(part)
  step = 1e-6
  result = every_loss(logprobs, values, batch)
  tokens = rng.permutation(np.argwhere(part['mask']))[:10]
  for row, column in tokens:
    up = jnp.zeros_like(logprobs).at[row, column].set(step)
    high = every_loss(logprobs + up, values + up, batch)
    low = every_loss(logprobs - up, values - up, batch)
    for name in result:
      if name != 'cispo':
        slope = (high[name][0].total - low[name][0].total) / (2 * step)
        np.testing.assert_allclose(
            result[name][1][row, column], slope, rtol=1e-5, atol=1e-8,
            err_msg=name,
        )  # fmt: skip


def loop_loss(name, part, row, column):
  """Per-token value of a loss, written out."""
  mask = part['mask'][row]
  gap = (part['logprobs'] - part['old_logprobs'])[row]
  advantage = part['advantages'][row, column]
  low, high = OPTIONS[name].clip_low, OPTIONS[name].clip_high
  ratio = np.exp(gap[column])
  if name == 'sft':
    return -part['logprobs'][row, column]
  if name == 'reinforce':
    return -advantage * part['logprobs'][row, column]
  if name == 'cispo':
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -bounded * advantage * part['logprobs'][row, column]
  if name == 'sapo':
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage / (1 + np.exp(-tau * (ratio - 1))) * 4 / tau
  if name == 'gmpo':
    clipped = []
    for x, a in zip(gap[mask], part['advantages'][row][mask], strict=True):
      bounded = min(max(x, -low), high)
      clipped.append(min(x, bounded) if a > 0 else max(x, bounded))
    mean = np.exp(np.mean(clipped))
    return -np.mean(part['advantages'][row][mask]) * mean
  if name == 'gspo':
    ratio = np.exp(np.mean(gap[mask]))
  bounded = min(max(ratio, 1 - low), 1 + high)
  loss = max(-advantage * ratio, -advantage * bounded)
  if name == 'ppo_clip' and advantage < 0:
    loss = min(loss, -3.0 * advantage)
  return loss


@pytest.mark.parametrize('name', losses.LOSSES)
def test_loop(name):
  for seed in range(5):
    part = parts(seed)
    mean = every_loss(*build(part))[name][0]
    total = count = 0.0
    for row in range(ROWS):
      size = part['mask'][row].sum()
      if not size or not part['row_weight'][row]:
        continue
      count += 1
      for column in np.flatnonzero(part['mask'][row]):
        loss = loop_loss(name, part, row, column)
        if name != 'sft':
          loss *= part['correction'][row, column]
        x = (part['logprobs'] - part['reference_logprobs'])[row, column]
        loss += 0.1 * min(np.exp(-x) + x - 1, 10)
        total += loss / size
    np.testing.assert_allclose(mean.count, count)
    np.testing.assert_allclose(mean.total, total, rtol=1e-9)


def aggregate_loop(loss, part, mode):
  """The six aggregations, written out."""
  rows = [
      row
      for row in range(ROWS)
      if part['row_weight'][row] and part['mask'][row].any()
  ]
  tokens = {row: loss[row][part['mask'][row]] for row in rows}
  if not rows:
    return 0.0
  if mode == 'token-mean':
    return np.concatenate(list(tokens.values())).mean()
  if mode == 'token-sum':
    return sum(x.sum() for x in tokens.values())
  if mode == 'prompt-mean':
    prompts = []
    for group in {part['group'][row] for row in rows}:
      members = [tokens[row] for row in rows if part['group'][row] == group]
      prompts.append(np.concatenate(members).mean())
    return np.mean(prompts)
  per_row = {
      'seq-mean-token-mean': np.mean,
      'seq-mean-token-sum': np.sum,
      'seq-mean-token-sum-norm': lambda x: np.sum(x) / 5.0,
  }[mode]
  return np.mean([per_row(x) for x in tokens.values()])


@pytest.mark.parametrize('mode', aggregate.AGGREGATIONS)
def test_aggregation_loop(mode):
  for seed in range(5):
    part = parts(seed)
    loss = np.random.default_rng(seed).normal(size=part['mask'].shape)
    weight, denominator = aggregate.token_weights(
        jnp.asarray(part['mask']),
        jnp.asarray(part['row_weight']),
        jnp.asarray(part['group']),
        mode,
        5.0,
    )
    actual = np.sum(weight * loss) / np.sum(denominator)
    np.testing.assert_allclose(actual, aggregate_loop(loss, part, mode))


@EXAMPLES
@given(seed=st.integers(0, 10**6), mask=hnp.arrays(bool, (ROWS, LENGTH)))
def test_no_mask_gives_nan(seed, mask):
  logprobs, values, batch = build(parts(seed, mask))
  for name, (mean, gradient, metrics) in every_loss(
      logprobs, values, batch
  ).items():
    assert np.isfinite(mean.total) and np.isfinite(mean.count), name
    gradient = np.array(gradient)
    assert np.isfinite(gradient).all(), name
    assert not gradient[~mask].any(), name
    for key, metric in metrics.items():
      assert np.isfinite(metric.value()), key


def test_an_empty_batch_gives_zero():
  part = parts(0, np.zeros((ROWS, LENGTH), bool))
  for mean, gradient, _ in every_loss(*build(part)).values():
    assert mean.value() == 0
    assert not np.array(gradient).any()


@EXAMPLES
@given(seed=st.integers(0, 10**6))
def test_no_advantage_no_gradient(seed):
  part = parts(seed)
  part['advantages'] = np.where(part['mask'], 0.0, np.nan)
  logprobs, values, batch = build(part)
  batch = batch.replace(reference_logprobs=logprobs)  # k3 is flat there
  for name, (_, gradient, _) in every_loss(logprobs, values, batch).items():
    if name not in ('sft', 'value'):
      assert not np.array(gradient).any(), name


def lay_side_by_side(tree):
  """Rows 2k and 2k + 1 in one bin, and a gap of padding after them."""

  def lay(x):
    x = np.asarray(x).reshape(ROWS // 2, 2 * LENGTH)
    return np.pad(x, ((0, 0), (0, 3)))

  return jax.tree.map(lay, tree)


@EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(aggregate.AGGREGATIONS),
)
def test_packing_does_not_matter(seed, mode):
  inputs = build(parts(seed), mode)
  plain = every_loss(*inputs)
  logprobs, values, batch = lay_side_by_side(inputs)
  segment = np.repeat([1, 2, 0], [LENGTH, LENGTH, 3])
  batch = batch.replace(
      segment=np.broadcast_to(segment, logprobs.shape).astype(np.int32)
  )
  packed = every_loss(logprobs, values, batch)
  for name, (mean, gradient, metrics) in plain.items():
    other = packed[name]
    np.testing.assert_allclose(other[0].total, mean.total, rtol=1e-9)
    np.testing.assert_allclose(other[0].count, mean.count, rtol=1e-9)
    np.testing.assert_allclose(
        np.asarray(other[1])[:, :-3].reshape(ROWS, LENGTH), gradient, atol=1e-12
    )
    for key in metrics:
      np.testing.assert_allclose(
          other[2][key].value(), metrics[key].value(), rtol=1e-9, atol=1e-12
      )


@EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(aggregate.AGGREGATIONS),
    data=st.data(),
)
def test_micro_batches_do_not_matter(seed, mode, data):
  """Any half of the rows first, then the others: sums add up."""
  inputs = build(parts(seed), mode)
  whole = every_loss(*inputs)
  order = np.array(data.draw(st.permutations(range(ROWS))))
  halves = [
      every_loss(*jax.tree.map(lambda x, rows=rows: x[rows], inputs))
      for rows in (order[: ROWS // 2], order[ROWS // 2 :])
  ]
  for name, (mean, gradient, metrics) in whole.items():
    both = halves[0][name][0] + halves[1][name][0]
    np.testing.assert_allclose(both.total, mean.total, rtol=1e-9)
    np.testing.assert_allclose(both.count, mean.count, rtol=1e-9)
    parts_ = np.concatenate([half[name][1] for half in halves])
    np.testing.assert_allclose(parts_, np.asarray(gradient)[order], atol=1e-12)
    for key in metrics:
      both = halves[0][name][2][key] + halves[1][name][2][key]
      np.testing.assert_allclose(
          both.value(), metrics[key].value(), rtol=1e-9, atol=1e-12
      )


@pytest.mark.parametrize('gap', [100.0, -100.0])
def test_a_clamped_ratio_has_no_gradient(gap):
  part = parts(0)
  part['logprobs'] = np.where(part['mask'], part['old_logprobs'] + gap, np.nan)
  logprobs, values, batch = build(part)
  batch = batch.replace(reference_logprobs=logprobs)
  result = every_loss(logprobs, values, batch)
  for name in ('ppo_clip', 'sapo', 'gmpo'):
    mean, gradient, _ = result[name]
    assert np.isfinite(mean.total), name
    assert not np.array(gradient).any(), name


def test_what_is_missing_is_named():
  logprobs, values, batch = build(parts(0))
  options = OPTIONS['ppo_clip']
  with pytest.raises(ValueError, match='reference log-probs'):
    losses.policy_loss(
        logprobs, None, batch.replace(reference_logprobs=None), options
    )
  with pytest.raises(ValueError, match='denominator'):
    losses.policy_loss(logprobs, None, batch.replace(denominator=None), options)
  with pytest.raises(ValueError, match='entropy'):
    losses.policy_loss(logprobs, None, batch, LossOptions(entropy_coef=0.1))
  with pytest.raises(ValueError, match='value_targets'):
    value.value_loss(values, batch.replace(value_targets=None), options)


def test_entropy_bonus_is_aggregated_like_the_loss():
  logprobs, _, batch = build(parts(0))
  entropy = jnp.where(batch.mask, jnp.abs(logprobs), jnp.nan)
  base = LossOptions(aggregation='seq-mean-token-mean')
  with_bonus = LossOptions(aggregation='seq-mean-token-mean', entropy_coef=0.3)
  without, _ = losses.policy_loss(logprobs, entropy, batch, base)
  mean, metrics = losses.policy_loss(logprobs, entropy, batch, with_bonus)
  bonus = jnp.nansum(batch.weight * entropy)
  np.testing.assert_allclose(mean.total, without.total - 0.3 * bonus)
  counted = batch.mask & (batch.weight != 0)
  np.testing.assert_allclose(
      metrics['policy/entropy'].value(), entropy[counted].mean()
  )


def test_value_mask_limits_training():
  _, values, batch = build(parts(0), 'token-mean')
  chosen = np.zeros((ROWS, LENGTH), bool)
  chosen[:, ::2] = True
  weight = jnp.where(chosen, batch.weight, 0)
  batch = batch.replace(value_weight=weight, value_denominator=weight)
  options = LossOptions(value_clip=0.0)

  def total(x):
    return value.value_loss(x, batch, options)[0].total

  gradient = np.array(jax.grad(total)(values))
  trained = np.array(batch.mask & (batch.weight != 0)) & chosen
  assert not gradient[~trained].any()
  error = (np.array(values) - np.array(batch.value_targets))[trained]
  mean = value.value_loss(values, batch, options)[0]
  np.testing.assert_allclose(mean.value(), (error**2).mean() / 2)
