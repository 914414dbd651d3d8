"""What the keys of `config.algorithm` can name, and what follows from a name.

Each choice brings bounds that its paper or its reference code sets, and reads
some of the other keys and not the rest.  Leaves out every formula and every
check (`options`, `train/settings.py`).  Invariant: a key that the chosen name
does not read is refused at start-up when it is set, so that no value is
ignored in silence; each table names its whole registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_rl_jax.algorithms import aggregate, kl

# Keys of advantages.ADVANTAGES -> which keys of `options.AdvantageOptions`
# each reads beside those of the KL.
ESTIMATORS: dict[str, tuple[str, ...]] = {
    'reinforce': (
        'normalize_std',
        'epsilon',
        'baseline',
        'baseline_decay',
        'baseline_window',
    ),
    'reward_to_go': ('gamma', 'turn_rewards'),
    'reinforce_plus_plus': ('gamma', 'turn_rewards'),
    'reinforce_plus_plus_baseline': (),
    'rloo': (),
    'remax': ('turn_rewards',),
    'grpo': ('normalize_std', 'epsilon'),
    'dr_grpo': (),
    'gdpo': ('component_weights', 'epsilon'),
    'opo': (),
    'gpg': (),
    'gae': ('gamma', 'lam', 'whiten', 'turn_rewards'),
    'bi_level_gae': ('gamma', 'lam', 'high_gamma', 'whiten', 'turn_rewards'),
    'turn_gae': ('gamma', 'lam', 'whiten', 'turn_rewards'),
    'turn_return': ('gamma', 'turn_rewards'),
    'mt_grpo': ('normalize_std', 'epsilon', 'turn_coef'),
    'gigpo': (
        'normalize_std',
        'epsilon',
        'gamma',
        'turn_rewards',
        'step_coef',
        'similarity',  # read where the batch is made
        'pooled',
    ),
}

# reinforce's running baselines.
BASELINES: dict[str, tuple[str, ...]] = {
    'batch_mean': (),
    'all': (),
    'exponential': ('baseline_decay',),
    'window': ('baseline_window',),
}

# (clip_low, clip_high) that each loss's paper or reference code sets.
CLIP_BOUNDS = {
    'ppo_clip': (0.2, 0.28),  # DAPO
    'gspo': (3e-4, 4e-4),
    'cispo': (1.0, 4.0),  # no lower bound, ratio capped at 5 (ScaleRL)
    'gmpo': (0.4, 0.4),  # of the log-ratio
    'sapo': (0.0, 0.0),  # unread
    'reinforce': (0.0, 0.0),  # unread
    'sft': (0.0, 0.0),  # unread
}

# The aggregation of each loss's paper.
AGGREGATION = {
    'ppo_clip': 'token-mean',  # DAPO
    'gspo': 'seq-mean-token-mean',
    'cispo': 'token-mean',
    'gmpo': 'seq-mean-token-mean',
    'sapo': 'seq-mean-token-mean',
    'reinforce': 'token-mean',
    'sft': 'token-mean',
}

# These are means over rows by definition.
ROW_LOSSES = ('gspo', 'gmpo')

# (correction_low, correction_high), bounds of the weight old / sampler.
CORRECTION_BOUNDS = {
    'none': (0.0, 0.0),
    'tis': (0.0, 2.0),
    'tis_sequence': (0.0, 2.0),
    'tis_geometric': (0.0, 2.0),
    'icepop': (0.5, 5.0),
    'icepop_sequence': (0.0, 3.0),
    'icepop_geometric': (0.999, 1.001),
}

# (rejection_low, rejection_high); k1 bounds the ratio old / sampler, k2 and k3
# bound a divergence, whose low is unread.
REJECTION_BOUNDS = {
    'none': (0.0, 0.0),
    'token_k1': (0.5, 2.0),
    'token_k2': (0.0, 0.3),
    'token_k3': (0.0, 0.3),
    'seq_sum_k1': (0.5, 2.0),
    'seq_sum_k2': (0.0, 0.3),
    'seq_sum_k3': (0.0, 0.3),
    'seq_mean_k1': (0.999, 1.001),
    'seq_mean_k2': (0.0, 0.01),
    'seq_mean_k3': (0.0, 0.01),
    'seq_max_k2': (0.0, 0.3),
    'seq_max_k3': (0.0, 0.3),
}

_CLIP = ('clip_low', 'clip_high', 'opsm_delta')


def _rejection_reads(name: str) -> tuple[str, ...]:
  if name == 'none':
    return ()
  low = ('rejection_low',) if name.endswith('k1') else ()
  return (*low, 'rejection_high', 'rejection_denominator')


# Key of `config.algorithm` -> its value -> which other keys are read then.  A
# key that a value leaves unread has no say in what is read: with gdpo, which
# reads no normalize_std, epsilon is read whatever that is.
READ: dict[str, Mapping[Any, tuple[str, ...]]] = {
    'advantage': ESTIMATORS,
    'baseline': BASELINES,
    'normalize_std': {True: ('epsilon',), False: ()},
    'loss': {
        'ppo_clip': (*_CLIP, 'dual_clip'),
        'gspo': _CLIP,
        'cispo': _CLIP,
        'gmpo': _CLIP,
        'sapo': ('sapo_positive', 'sapo_negative', 'opsm_delta'),
        'reinforce': ('opsm_delta',),
        'sft': (),
    },
    'aggregation': {
        name: ('norm_length',) if name == 'seq-mean-token-sum-norm' else ()
        for name in aggregate.AGGREGATIONS
    },
    'kl': {
        'none': (),
        **dict.fromkeys(
            kl.KL_KINDS,
            (
                'kl_coef',
                'kl_placement',
                'kl_importance',
                'kl_adaptive',
                'kl_target',
                'kl_horizon',
            ),
        ),
    },
    'kl_adaptive': {True: ('kl_target', 'kl_horizon'), False: ()},
    'correction': {
        name: ()
        if name == 'none'
        else ('correction_low', 'correction_high', 'correction_normalize')
        for name in CORRECTION_BOUNDS
    },
    'rejection': {name: _rejection_reads(name) for name in REJECTION_BOUNDS},
}
