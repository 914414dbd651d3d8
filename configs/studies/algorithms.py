"""Every estimator and every loss on the quickstart's task, side by side.

  python -m experiments.sweep --config=configs/studies/algorithms.py

Estimators run with the default loss, losses with GRPO's advantages; four
updates per rollout batch, since with one the ratio is 1 and clipped losses
cannot differ.  All hyperparameters are the quickstart's, were fixed before any
arm was run and are the same for all: an arm changes what its name says and
what cannot be run otherwise, and so no arm is tuned.  Each loss has the clip
bounds and the aggregation of its paper.  The recipes at the end
are the configs/algorithms/*.py whose point is which episodes are trained on.

What the task does not offer shows nothing: it has one reward component (gdpo
is GRPO), no turn rewards (mt_grpo) and no states that repeat (gigpo).
Corrections are left out: sampler and trainer are one function here, and their
weights are 1.

Twelve iterations were chosen for their cost, before any arm but GRPO and its
GSPO form was run.  `--config.study.jobs=2` runs two at a time, a core for each.

A small form, for one seed and two arms:

  python -m experiments.sweep --config=configs/studies/algorithms.py
      --config.run_dir=runs/small_study --config.study.seeds='(0,)'
      --config.study.only="('grpo_gspo',)" --config.train.iterations=5
"""

import importlib

from ml_collections import config_dict

from agent_rl_jax.train.config import flatten
from configs import quickstart

LENGTH = 128.0  # rollout.max_episode_tokens

# Name -> the keys that it changes in the common config.
ESTIMATORS = {
    'grpo': {},
    'grpo_std': {'algorithm.normalize_std': True},
    'dr_grpo': {
        'algorithm.advantage': 'dr_grpo',
        'algorithm.norm_length': LENGTH,
    },
    'rloo': {'algorithm.advantage': 'rloo'},
    'opo': {'algorithm.advantage': 'opo'},
    'gpg': {'algorithm.advantage': 'gpg'},
    'gdpo': {'algorithm.advantage': 'gdpo'},
    'reinforce': {'algorithm.advantage': 'reinforce'},
    'reinforce_all': {
        'algorithm.advantage': 'reinforce',
        'algorithm.baseline': 'all',
    },
    'reinforce_exponential': {
        'algorithm.advantage': 'reinforce',
        'algorithm.baseline': 'exponential',
    },
    'remax': {'algorithm.advantage': 'remax'},
    'reward_to_go': {'algorithm.advantage': 'reward_to_go'},
    'reinforce_plus_plus': {'algorithm.advantage': 'reinforce_plus_plus'},
    'reinforce_plus_plus_baseline': {
        'algorithm.advantage': 'reinforce_plus_plus_baseline',
    },
    'turn_return': {
        'algorithm.advantage': 'turn_return',
        'algorithm.gamma': 0.9,
    },
    'mt_grpo': {'algorithm.advantage': 'mt_grpo'},
    'gigpo': {'algorithm.advantage': 'gigpo', 'algorithm.gamma': 0.95},
    'gae': {'algorithm.advantage': 'gae', 'critic.kind': 'own'},
    'bi_level_gae': {
        'algorithm.advantage': 'bi_level_gae',
        'critic.kind': 'own',
    },
    'turn_gae': {'algorithm.advantage': 'turn_gae', 'critic.kind': 'own'},
}

LOSSES = {
    f'grpo_{loss}': {'algorithm.loss': loss}
    for loss in ('gspo', 'cispo', 'sapo', 'gmpo', 'reinforce')
}

# Whole methods, whose point is which episodes are trained on.
RECIPES = ('dapo', 'starpo', 'zerotir', 'replay')


def recipe(name: str) -> dict:
  """What configs/algorithms/NAME.py changes in the quickstart."""
  module = importlib.import_module(f'configs.algorithms.{name}')
  common = flatten(quickstart.get_config())
  return {
      key: value
      for key, value in flatten(module.get_config()).items()
      if value != common[key] and key not in ('run_dir', 'train.mini_batches')
  }


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/studies/algorithms'
  config.train.iterations = 12
  config.train.mini_batches = 4
  config.algorithm.advantage = 'grpo'
  config.algorithm.loss = 'ppo_clip'

  config.eval.every = 0
  config.eval.without_tool = False
  config.report.tensorboard = False
  config.report.trajectories_every = 0
  config.report.html = False
  config.report.curves = False

  with config.unlocked():
    config.study = config_dict.create(
        seeds=(0, 1, 2),
        arms=tuple(
            (name, tuple(changes.items()))
            for name, changes in {
                **ESTIMATORS,
                **LOSSES,
                **{name: recipe(name) for name in RECIPES},
            }.items()
        ),
        baseline='grpo',  # what the other arms are compared with
        only=(),  # names of the arms to run; () = all
        jobs=1,  # runs at a time, each on its share of the cores
    )
  return config
