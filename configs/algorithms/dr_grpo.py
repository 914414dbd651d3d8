"""Dr. GRPO: no standard deviation, rows summed and divided by a constant.

  python -m experiments.train --config=configs/algorithms/dr_grpo.py

Liu et al. 2025, arXiv 2503.20783.  Long wrong answers are not cheaper per token
than short ones.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/dr_grpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'dr_grpo'
  config.algorithm.clip_high = 0.2
  config.algorithm.norm_length = float(config.rollout.max_episode_tokens)
  return config
