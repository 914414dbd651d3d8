"""GRPO as published: group-normalized rewards, row means, KL in the loss.

  python -m experiments.train --config=configs/algorithms/grpo.py

Shao et al. 2024, arXiv 2402.03300.  The base config differs from it: no
standard deviation, no KL, token mean.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/grpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.clip_high = 0.2
  config.algorithm.aggregation = 'seq-mean-token-mean'
  config.algorithm.kl = 'k3'
  config.algorithm.kl_coef = 0.04
  return config
