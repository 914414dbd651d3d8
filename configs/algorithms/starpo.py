"""StarPO-S: the groups of most uncertain outcome, a critic, a higher clip.

  python -m experiments.train --config=configs/algorithms/starpo.py

RAGEN, Wang et al. 2025, arXiv 2504.20073.  A quarter of the groups, those of
largest reward spread, make up the loss; the others cost their rollout only.
No KL, and a small entropy bonus.  `train.epochs` above 1 updates more often on
one set of rollouts, which the paper finds worse than fresh ones.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.run_dir = 'runs/starpo'
  config.train.mini_batches = 4  # with one update every ratio is 1
  config.algorithm.advantage = 'gae'
  config.algorithm.clip_low = 0.2
  config.algorithm.clip_high = 0.28
  config.algorithm.entropy_coef = 0.001
  config.critic.kind = 'own'
  config.filter.name = 'top_share'
  config.filter.value = 0.25
  config.filter.measure = 'std'
  return config
