"""OPO: the baseline that is best when gradients grow with length.

  python -m experiments.train --config=configs/algorithms/opo.py

Hao et al. 2025, arXiv 2505.23585.  One update per batch, as it is derived on-
policy.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/opo'
  config.algorithm.advantage = 'opo'
  config.algorithm.loss = 'reinforce'
  return config
