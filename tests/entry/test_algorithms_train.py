"""Each config of an algorithm trains: it runs, stays finite, moves the policy.

A tiny policy, two iterations of the real loop from one random start.  The
rollout's programs are compiled once for all; what an algorithm compiles itself
is what it costs here.
"""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from agent_rl_jax.data.tasks import make_stream
from agent_rl_jax.models import policy
from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rewards.reward import per_episode
from agent_rl_jax.train import parts as parts_lib
from agent_rl_jax.train import settings as settings_lib
from agent_rl_jax.train.collect import Collector
from agent_rl_jax.train.loop import Trainer
from configs import base
from tests.entry import runner
from tests.unit.test_algorithms_configs import NAMES


def _even(task, episode):
  """1 for an even number of sampled tokens: groups are mixed."""
  del task
  return float(episode.num_action_tokens % 2 == 0)


def _tiny(name, run_dir):
  """The config of an algorithm, all that it does not choose made small."""
  config = importlib.import_module(f'configs.algorithms.{name}').get_config()
  config.run_dir = str(run_dir)
  config.tokenizer.vocab_size = 400
  config.tokenizer.corpus = 150
  config.model.num_layers = 1
  config.model.width = 16
  config.model.num_heads = config.model.num_kv_heads = 1
  config.model.head_dim = config.model.mlp_width = 16
  config.sft.exercise_steps = config.sft.steps = 0
  config.rollout.slots = 16
  config.rollout.max_len = 160
  config.rollout.chunk = 8
  config.rollout.max_action_tokens = 12
  config.rollout.max_episode_tokens = 36
  config.rewards.names = ('even', *config.rewards.names[1:])
  config.rewards.metric = 'even'
  config.train.iterations = 2
  config.train.prompts = 4
  config.train.samples = 4
  config.train.mini_batches = min(2, config.train.mini_batches)
  config.train.pack_len = (160,)
  if config.overlong.penalty:
    config.overlong.buffer = 8
  return settings_lib.resolve(config, base.get_config())


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """Parts, of which an algorithm replaces the settings, and parameters."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(REWARDS, 'even', lambda: per_episode(_even))
    runner.make_erratic(patch)
    parts = parts_lib.build(_tiny('grpo', tmp_path_factory.mktemp('run')))
    start = jax.device_get(policy.init(parts.model, jax.random.key(0)))
    yield parts, start
    parts.close()


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_algorithm_trains(name, shared):
  common, start = shared
  settings = _tiny(name, common.settings.run_dir)
  # Else the shared programs would be another run's.
  assert settings.rollout == common.settings.rollout
  parts = dataclasses.replace(common, settings=settings)
  trainer = Trainer(parts)
  tasks = make_stream(settings.data, seed=settings.seed)
  collector = Collector(parts, parts.engine, parts.rewards(), tasks)
  state, carried = trainer.init(start)
  moved = []
  for iteration in range(2):
    before = jax.device_get(state.trainable['policy'])
    collected = collector.collect(
        parts.publish(state.trainable['policy']), iteration
    )
    state, carried, done = trainer.iterate(state, carried, collected, iteration)
    wrong = {k: v for k, v in done.metrics.items() if not np.isfinite(v)}
    assert not wrong
    assert done.metrics['train/skipped'] == 0
    assert np.isfinite(done.advantages).all()
    after = jax.device_get(state.trainable['policy'])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    moved.append(
        any(
            (a != b).any()
            for a, b in zip(
                jax.tree.leaves(before), jax.tree.leaves(after), strict=True
            )
        )
    )
  assert all(moved)
  # There was something to learn from.
  assert done.metrics['group/return_std'] > 0
  assert np.abs(done.advantages).max() > 0
  assert set(carried) <= {'baseline', 'kl_coef'}
