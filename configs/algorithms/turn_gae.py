"""GAE with one step of the decision process per turn.

  python -m experiments.train --config=configs/algorithms/turn_gae.py

Values are trained at the first token of each turn alone, by a head on the
policy's trunk.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/turn_gae'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'turn_gae'
  config.algorithm.lam = 0.95
  config.critic.kind = 'shared'
  return config
