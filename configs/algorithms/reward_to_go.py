"""The policy gradient with rewards to go and no baseline.

  python -m experiments.train --config=configs/algorithms/reward_to_go.py

The yardstick of high variance.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/reward_to_go'
  config.algorithm.advantage = 'reward_to_go'
  config.algorithm.loss = 'reinforce'
  return config
