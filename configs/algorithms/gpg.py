"""GPG: the plain policy gradient, scaled up where rewards are zero.

  python -m experiments.train --config=configs/algorithms/gpg.py

Chu et al. 2025, arXiv 2504.02546, in verl's form: the scale is episodes over
episodes of nonzero reward, where the paper's counts groups whose rewards are
all equal.  The reward here is 0 or 1, so that it is 1 / accuracy; any shaping
(overlong.penalty, a format or length reward, a KL in the reward) may make
failures nonzero, and the scale then tends to 1.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gpg'
  config.algorithm.advantage = 'gpg'
  config.algorithm.loss = 'reinforce'
  return config
