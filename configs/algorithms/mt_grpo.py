"""MT-GRPO: the turn reward goes to what precedes the first tool result.

  python -m experiments.train --config=configs/algorithms/mt_grpo.py

Zeng et al. 2025, arXiv 2505.11821.  For environments that reward turns; without
such rewards it is GRPO.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/mt_grpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'mt_grpo'
  config.algorithm.normalize_std = True
  return config
