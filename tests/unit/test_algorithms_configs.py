"""Every config of an algorithm can be run as it stands."""

import importlib
import pathlib

import numpy as np
import pytest

from agent_rl_jax.algorithms import filters
from agent_rl_jax.train import settings
from configs import algorithms, base

NAMES = sorted(
    path.stem
    for path in pathlib.Path(algorithms.__file__).parent.glob('*.py')
    if path.stem != '__init__'
)

# Named for what they put together, not for one estimator or loss.
RECIPES = ('dapo', 'replay', 'starpo', 'zerotir')


@pytest.mark.parametrize('name', NAMES)
def test_config_resolves(name):
  config = importlib.import_module(f'configs.algorithms.{name}').get_config()
  resolved = settings.resolve(config, base.get_config())
  assert config.run_dir.endswith(name)
  chosen = (
      resolved.algorithm.advantage,
      resolved.algorithm.loss,
      resolved.algorithm.correction,
  )
  assert name in (*chosen, *RECIPES)


def test_recipes_filter_or_replay():
  made = {
      name: settings.resolve(
          importlib.import_module(f'configs.algorithms.{name}').get_config(),
          base.get_config(),
      )
      for name in RECIPES
  }
  dapo = made['dapo']
  assert dapo.filter.resamples
  # Its shaping can be felt: a prompt takes 30 to 40 tokens of a row.
  sampled = np.array([dapo.rollout.max_len - 40])
  limit = dapo.overlong.limit or dapo.rollout.max_episode_tokens
  assert filters.overlong_penalty(
      sampled, limit, dapo.overlong.buffer, dapo.overlong.penalty
  ) < -0.1  # fmt: skip
  assert made['zerotir'].filter.name == 'accuracy_band'
  assert made['starpo'].filter.name == 'top_share'
  assert made['replay'].replay.capacity > 0
