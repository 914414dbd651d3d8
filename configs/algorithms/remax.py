"""ReMax: a greedy episode of the same prompt is the baseline.

  python -m experiments.train --config=configs/algorithms/remax.py

Li et al. 2023, arXiv 2310.10505.  Unbiased, and needs no group; one more
episode is played for every prompt and never trained on.  Without the KL in the
reward of the paper: algorithm.kl='k1', kl_placement='reward' and a kl_coef
bring it back.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/remax'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'remax'
  config.algorithm.clip_high = 0.2
  return config
