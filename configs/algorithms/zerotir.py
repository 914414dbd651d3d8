"""ZeroTIR: groups of middling accuracy, leftovers carried on, REINFORCE++.

  python -m experiments.train --config=configs/algorithms/zerotir.py

Mai et al. 2025, arXiv 2505.07773.  Its replay buffer is filled through the
accuracy band, and what a batch leaves over goes into the next one: here that is
the surplus of the filter.  Left-over groups are an iteration old, which the
ratio to the sampler's own log-probs holds.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/zerotir'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.train.old_logprobs = 'sampler'
  config.algorithm.advantage = 'reinforce_plus_plus_baseline'
  config.algorithm.clip_low = 0.2
  config.algorithm.clip_high = 0.28
  config.algorithm.aggregation = 'token-mean'
  config.filter.name = 'accuracy_band'
  config.filter.band_low = 0.2
  config.filter.band_high = 0.8
  config.filter.tries = 4
  return config
