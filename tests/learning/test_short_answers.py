"""A policy of random weights learns what is rewarded, through the real loop."""

import json

import numpy as np
import pytest

from agent_rl_jax.train import run, settings
from configs import base


def _config(run_dir):
  """Every sampled token costs: the policy learns to end its turn."""
  config = base.get_config()
  config.run_dir = str(run_dir)
  config.model.width = 32
  config.model.num_layers = 1
  config.model.num_heads = config.model.num_kv_heads = 2
  config.model.head_dim = 8
  config.model.mlp_width = 32
  config.rollout.slots = 32
  config.rollout.max_len = 160
  config.rollout.chunk = 4
  config.rollout.max_action_tokens = 16
  config.rollout.max_episode_tokens = 16
  config.rollout.max_turns = 1
  config.rewards.names = ('length_cost', 'answer')
  config.rewards.weights = (60.0, 0.0)
  config.train.iterations = 12
  config.train.prompts = 4
  config.train.samples = 8
  config.train.pack_len = (160,)
  config.train.lr = 0.01
  config.eval.every = 0
  config.eval.problems = 4
  config.eval.final_problems = 4
  config.report.progress = False
  config.report.tensorboard = False
  config.report.curves = False
  return config


@pytest.mark.slow
@pytest.mark.parametrize('loss', ['ppo_clip', 'gspo'])
def test_short_answers_are_learned(tmp_path, loss):
  config = _config(tmp_path)
  config.algorithm.loss = loss
  run.run(config, settings.resolve(config, base.get_config()))
  lines = (tmp_path / 'rl' / 'metrics.jsonl').read_text().splitlines()
  tokens = [json.loads(line)['episode/action_tokens'] for line in lines]
  # Of 16 at most; a turn ends by chance with the second of 260 tokens.
  assert tokens[0] > 13
  assert np.mean(tokens[-2:]) < 4
