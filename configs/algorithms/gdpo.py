"""GDPO: each reward component normalized on its own.

  python -m experiments.train --config=configs/algorithms/gdpo.py

Liu et al. 2026, arXiv 2601.05242.  For rewards of several components, which
GRPO would let drown each other.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gdpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'gdpo'
  return config
