"""Truncated importance sampling for a sampler that differs from the trainer.

  python -m experiments.train --config=configs/algorithms/tis.py

Yao et al. 2025.  Matters with another precision, another engine or stale
weights; here the weights stay near 1.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/tis'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.train.old_logprobs = 'recompute'
  config.algorithm.correction = 'tis'
  return config
