"""Every config of an algorithm can be run as it stands."""

import importlib
import pathlib

import pytest

from agent_rl_jax.train import settings
from configs import algorithms, base

NAMES = sorted(
    path.stem
    for path in pathlib.Path(algorithms.__file__).parent.glob('*.py')
    if path.stem != '__init__'
)


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
  assert name in (*chosen, 'dapo')
