"""REINFORCE++ with the group mean as its baseline.

  python -m experiments.train --config=configs/algorithms/reinforce_plus_plus_baseline.py

Hu et al. 2025, arXiv 2501.03262.  Whitened over the batch, so that easy groups
are not scaled up.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/reinforce_plus_plus_baseline'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'reinforce_plus_plus_baseline'
  config.algorithm.clip_high = 0.2
  return config
