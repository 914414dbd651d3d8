"""GSPO: one ratio per row, clipped in a range a thousand times narrower.

  python -m experiments.train --config=configs/algorithms/gspo.py

Zheng et al. 2025, arXiv 2507.18071.  Clips far more tokens than PPO; that is
expected.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gspo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.loss = 'gspo'
  return config
