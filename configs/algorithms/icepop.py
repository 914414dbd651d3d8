"""IcePop: tokens whose sampler and trainer disagree teach nothing.

  python -m experiments.train --config=configs/algorithms/icepop.py

Ling team 2025.  As tis, but outlying tokens are dropped instead of bounded.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/icepop'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.train.old_logprobs = 'recompute'
  config.algorithm.correction = 'icepop'
  return config
