"""DAPO: dynamic sampling, higher upper clip, token mean, overlong shaping.

  python -m experiments.train --config=configs/algorithms/dapo.py

Yu et al. 2025, arXiv 2503.14476.  Groups that are all right or all wrong teach
nothing: new tasks are played until the batch is full, which costs as many more
rollouts as the policy is good.  No KL.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/dapo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'grpo'
  config.algorithm.normalize_std = True
  config.algorithm.clip_low = 0.2
  config.algorithm.clip_high = 0.28
  config.algorithm.aggregation = 'token-mean'
  config.filter.name = 'dynamic_sampling'
  config.filter.tries = 4
  # As in the paper, half of what lies between right and wrong (there 1 of 2,
  # here rewards are 0 and 1).  The buffer is half of the limit and not a fifth:
  # with a prompt in a row of 128, at most 99 tokens are sampled.
  config.overlong.penalty = 0.5
  config.overlong.buffer = 64
  return config
