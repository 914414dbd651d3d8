"""GMPO: the geometric mean of the row's ratios, clipped in log space.

  python -m experiments.train --config=configs/algorithms/gmpo.py

Zhao et al. 2025, arXiv 2507.20673.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gmpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.loss = 'gmpo'
  return config
