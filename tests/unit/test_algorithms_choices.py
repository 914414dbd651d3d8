"""What the tables say a choice reads is what its function asks for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_rl_jax.algorithms import (
    advantages,
    choices,
    corrections,
    group,
    losses,
)
from agent_rl_jax.algorithms.options import AdvantageOptions, AlgorithmOptions
from tests import algorithm_batches as batches
from tests.unit.test_algorithms_loss_properties import build, parts


class Asked:
  """Options that remember which of them were read."""

  def __init__(self, **values):
    self._options = AlgorithmOptions(**values)
    self.names = set()

  def __getattr__(self, name):
    self.names.add(name)
    return getattr(self._options, name)


def _about(choice):
  return set().union(*choices.READ[choice].values())


def test_no_option_is_forgotten():
  fields = {field.name for field in dataclasses.fields(AlgorithmOptions)}
  listed = set().union(*map(_about, choices.READ))
  # Read whatever the others are; value_clip is the critic's.
  free = {'advantage', 'loss', 'aggregation', 'kl', 'correction', 'rejection'}
  assert fields - listed == free | {'entropy_coef', 'value_clip'}


@pytest.mark.parametrize('name', advantages.ADVANTAGES)
def test_an_estimator_asks_for_what_it_is_said_to_read(name):
  batch, scores = batches.random_batch(0)
  seen = set()
  for baseline in choices.BASELINES:
    asked = Asked(
        advantage=name,
        baseline=baseline,
        normalize_std='normalize_std' in choices.ESTIMATORS[name],
        component_weights=(1.0, 0.5),
        norm_length=9.0,
    )
    jax.eval_shape(
        lambda batch, scores, asked=asked: advantages.ADVANTAGES[name](
            batch, scores, batches.states(), asked
        ),
        batch,
        scores,
    )
    seen |= asked.names
    if name != 'reinforce':
      break
  # States are compared before there is a batch (`train/assemble.py`).
  read = set(choices.ESTIMATORS[name]) - {'similarity'}
  assert seen & _about('advantage') == read


@pytest.mark.parametrize('name', losses.LOSSES)
def test_a_loss_asks_for_what_it_is_said_to_read(name):
  logprobs, _, batch = build(parts(0))
  asked = Asked(loss=name)
  jax.eval_shape(
      lambda x, rows: losses.LOSSES[name](x, rows, asked), logprobs, batch
  )
  # opsm_delta is no loss's own: it drops tokens of any that has advantages.
  read = set(choices.READ['loss'][name]) - {'opsm_delta'}
  assert asked.names & _about('loss') == read


@pytest.mark.parametrize('name', choices.CORRECTION_BOUNDS)
def test_a_correction_asks_for_what_it_is_said_to_read(name):
  asked = Asked(correction=name)
  jax.eval_shape(
      lambda batch, scores: corrections.correct(batch, scores, asked),
      *batches.random_batch(0),
  )
  read = set(choices.READ['correction'][name])
  assert asked.names & _about('correction') == read


@pytest.mark.parametrize('name', sorted({*choices.REJECTION_BOUNDS} - {'none'}))
def test_a_rejection_depends_on_the_bounds_that_it_is_said_to_read(name):
  gap = jnp.array([[0.1, -0.2, 0.3], [-0.3, -0.4, 0.1]])
  mask = jnp.ones(gap.shape, bool)
  kept = lambda low, high: np.array(
      corrections.kept(gap, mask, name, low, high)
  )
  assert kept(0.0, 1e3).all() and not kept(0.0, 1e-6).any()
  low_matters = not kept(1e2, 1e3).any()
  read = choices.READ['rejection'][name]
  assert low_matters == ('rejection_low' in read)
  assert {'rejection_high', 'rejection_denominator'} <= set(read)


def _four(answer, cost):
  """Four episodes of one group, of four tokens each, in float64."""
  batch, scores = batches.random_batch(0)
  rows = np.arange(batches.ROWS)
  mask = (rows < 4)[:, None] & (np.arange(batches.LENGTH) < 4)
  components = np.full((batches.ROWS, 2), np.nan)
  components[:4] = np.transpose([answer, cost])
  return (
      batch.replace(
          action_mask=mask,
          episode=rows.astype(np.int32),
          group=np.zeros(batches.ROWS, np.int32),
          valid=rows < 4,
          components=components,
          returns=components[:, 0],
      ),
      scores,
  )


@pytest.mark.parametrize(
    'weights, cost, expected',
    [
        # mean 1/2 and std 1/sqrt(3) in the group; sixteen tokens of +-sqrt(3)/2
        # have the variance 3/4 x 16/15: they are whitened to +-sqrt(15)/4.
        ((1.0, 0.0), (-3.0, -1.0, -2.0, -1.0), (1, -1, 1, -1)),
        ((1.0, 0.0), (np.nan, np.inf, 1.0, 2.0), (1, -1, 1, -1)),
        ((-2.0, 0.0), (0.0, 1.0, 2.0, 3.0), (-1, 1, -1, 1)),
    ],
)
def test_gdpo_reads_the_signs_of_weights_and_nothing_of_weight_0(
    weights, cost, expected
):
  with jax.enable_x64(True):
    batch, scores = _four((1.0, 0.0, 1.0, 0.0), cost)
    options = AdvantageOptions(advantage='gdpo', component_weights=weights)
    got = np.array(group.gdpo(batch, scores, None, options).advantages)
  wanted = np.array(expected)[:, None] * np.sqrt(15) / 4
  np.testing.assert_allclose(got[:4, :4], np.tile(wanted, 4), rtol=1e-5)
  assert not got[4:].any() and not got[:, 4:].any()
