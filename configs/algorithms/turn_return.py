"""Turn-discounted returns: what comes turns later counts less.

  python -m experiments.train --config=configs/algorithms/turn_return.py

Every token of a turn gets its turn's return.  Without a baseline.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/turn_return'
  config.algorithm.advantage = 'turn_return'
  config.algorithm.loss = 'reinforce'
  config.algorithm.gamma = 0.9
  return config
