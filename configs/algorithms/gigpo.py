"""GiGPO: episode advantages plus those of steps from equal states.

  python -m experiments.train --config=configs/algorithms/gigpo.py

Feng et al. 2025, arXiv 2505.10978.  For environments that name their states
(Observation.state_key); where none repeats in a group it is GRPO, and the log
says so.  The quickstart's environment names none.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/gigpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'gigpo'
  config.algorithm.normalize_std = True
  config.algorithm.gamma = 0.95
  return config
