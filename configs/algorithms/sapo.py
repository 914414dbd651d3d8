"""SAPO: a smooth gate on the ratio instead of a clip.

  python -m experiments.train --config=configs/algorithms/sapo.py

Gao et al. 2025.  As there, rows weigh alike whatever their length.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/sapo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.loss = 'sapo'
  return config
