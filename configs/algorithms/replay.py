"""GRPO that trains on a third of its groups again, corrected for staleness.

  python -m experiments.train --config=configs/algorithms/replay.py

Old log-probs are those of the policy at the start of the update, so that
truncated importance sampling weighs a replayed token by how far the policy has
moved since it was sampled.  Saves rollouts, and pays for them with variance.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/replay'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.train.old_logprobs = 'recompute'
  config.algorithm.advantage = 'grpo'
  config.algorithm.correction = 'tis'
  config.replay.capacity = 64
  config.replay.share = 0.34
  config.replay.max_age = 4
  config.replay.admit = 'mixed'
  return config
