"""MT-GRPO: the turn reward goes to what precedes the first tool result.

  python -m experiments.train --config=configs/algorithms/mt_grpo.py

Zeng et al. 2025, arXiv 2505.11821.  The environment rewards the first turn
whose tool call succeeds, and the reward `environment` makes that a part of the
return; without turn rewards it is GRPO.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/mt_grpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.env.call_reward = 0.2
  config.rewards.names = ('answer', 'environment')
  config.rewards.weights = (1.0, 1.0)
  config.algorithm.advantage = 'mt_grpo'
  config.algorithm.normalize_std = True
  return config
