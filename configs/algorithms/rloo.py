"""RLOO: each reward against the mean of the others of its group.

  python -m experiments.train --config=configs/algorithms/rloo.py

Ahmadian et al. 2024, arXiv 2402.14740.  Unbiased; the plain policy gradient is
its loss.  Without the KL in the reward of the paper: algorithm.kl='k1',
kl_placement='reward' and a kl_coef bring it back.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/rloo'
  config.algorithm.advantage = 'rloo'
  config.algorithm.loss = 'reinforce'
  return config
