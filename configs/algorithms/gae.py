"""PPO: token-level GAE with a critic on a trunk of its own.

  python -m experiments.train --config=configs/algorithms/gae.py

Schulman et al. 2016, arXiv 1506.02438, and 2017, arXiv 1707.06347.  Tokens of
tools neither bootstrap nor discount.  Twice the parameters of a critic-free
method in training, and a forward and backward pass more in each update.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gae'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'gae'
  config.algorithm.lam = 0.95
  config.algorithm.clip_high = 0.2
  config.critic.kind = 'own'
  return config
