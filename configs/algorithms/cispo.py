"""CISPO: clipped ratios as weights, so that no token loses its gradient.

  python -m experiments.train --config=configs/algorithms/cispo.py

MiniMax-M1 2025, arXiv 2506.13585.  Its loss holds log-probs and is not
comparable with PPO's.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/cispo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.loss = 'cispo'
  return config
