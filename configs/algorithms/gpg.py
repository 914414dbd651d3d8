"""GPG: the plain policy gradient, scaled up for batches without signal.

  python -m experiments.train --config=configs/algorithms/gpg.py

Chu et al. 2025, arXiv 2504.02546.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gpg'
  config.algorithm.advantage = 'gpg'
  config.algorithm.loss = 'reinforce'
  return config
