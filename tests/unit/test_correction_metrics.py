"""Corrections: what is told of them counts what a bound changed."""

import numpy as np
import pytest

from agent_rl_jax.algorithms import corrections
from agent_rl_jax.algorithms.choices import CORRECTION_BOUNDS
from agent_rl_jax.algorithms.options import CorrectionOptions
from agent_rl_jax.batch import Scores
from tests.train_cases import trajectory


def _changed(correction, **bounds):
  """Share of changed weights; log ratios 0.5 0.7 -0.1 and -0.3 0.1 of rows."""
  gap = np.full((2, 6), 9, np.float32)
  gap[0, 1:4], gap[1, 1:3] = [0.5, 0.7, -0.1], [-0.3, 0.1]
  batch = trajectory(rows=2, length=6, padding=0).replace(
      action_mask=gap != 9,
      valid=np.ones(2, bool),
      weight=np.ones(2, np.float32),
      sampler_logprobs=np.zeros((2, 6), np.float32),
  )
  options = CorrectionOptions(correction=correction, **bounds)
  told = corrections.correct(batch, Scores(gap), options).metrics
  return float(told['correction/changed_fraction'].value())


@pytest.mark.parametrize('normalize', [False, True])
@pytest.mark.parametrize(
    'correction', sorted(set(CORRECTION_BOUNDS) - {'none'})
)
def test_changed_fraction_counts_what_a_bound_changed(correction, normalize):
  changed = lambda low, high: _changed(
      correction,
      correction_low=low,
      correction_high=high,
      correction_normalize=normalize,
  )
  assert changed(0.0, 99.0) == 0
  # exp(0.6) = 1.82 is below two tokens' or one row's product of exp(1.1), and
  # above its mean exp(1.1 / 3) = 1.44; exp(0.3) = 1.35 is below that too.
  by_token = correction in ('tis', 'icepop')
  by_mean = correction.endswith('geometric')
  assert changed(0.0, 1.82) == pytest.approx(
      1 / 5 if by_token else 0.0 if by_mean else 3 / 5
  )
  assert changed(0.0, 1.35) == pytest.approx(2 / 5 if by_token else 3 / 5)
