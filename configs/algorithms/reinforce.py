"""REINFORCE with a running mean of earlier batches as its baseline.

  python -m experiments.train --config=configs/algorithms/reinforce.py

Williams 1992.  Needs no groups: samples may be 1.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/reinforce'
  config.algorithm.advantage = 'reinforce'
  config.algorithm.loss = 'reinforce'
  config.algorithm.baseline = 'exponential'
  return config
