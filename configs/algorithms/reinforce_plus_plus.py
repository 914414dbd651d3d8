"""REINFORCE++: whitened rewards to go and the clipped loss.

  python -m experiments.train --config=configs/algorithms/reinforce_plus_plus.py

Hu et al. 2025, arXiv 2501.03262, without its KL in the reward.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/reinforce_plus_plus'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'reinforce_plus_plus'
  config.algorithm.clip_high = 0.2
  return config
