"""DAPO: higher upper clip, token mean, no KL.

  python -m experiments.train --config=configs/algorithms/dapo.py

Yu et al. 2025, arXiv 2503.14476, without resampling.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/dapo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.clip_low = 0.2
  config.algorithm.clip_high = 0.28
  config.algorithm.aggregation = 'token-mean'
  return config
