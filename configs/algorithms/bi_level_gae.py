"""Bi-level GAE: first over turn ends, then over the tokens of each turn.

  python -m experiments.train --config=configs/algorithms/bi_level_gae.py

RAGEN, Wang et al. 2025, arXiv 2504.20073, with turn ends from the mask.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/bi_level_gae'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'bi_level_gae'
  config.algorithm.high_gamma = 0.95
  config.critic.kind = 'own'
  return config
