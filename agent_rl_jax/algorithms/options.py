"""Options of the algorithms room: frozen, validated, static under jit.

`AlgorithmOptions(**config.algorithm)` holds every key; estimators and losses
are typed by the part that they read.  Leaves out how updates are scheduled
(train).  Invariant: after construction every value is concrete (None has been
replaced by what the paper of the chosen loss or estimator sets) and the
combination means something.
"""

from __future__ import annotations

import dataclasses

from agent_rl_jax.algorithms import aggregate, kl

# Bounds (clip_low, clip_high) that each loss's paper or reference code sets.
CLIP_BOUNDS = {
    'ppo_clip': (0.2, 0.28),
    'reinforce': (0.0, 0.0),
    'sft': (0.0, 0.0),
}


@dataclasses.dataclass(frozen=True)
class AdvantageOptions:
  """What an estimator reads.

  Attributes:
    advantage: Key of ADVANTAGES.
    normalize_std: Divide by the group's standard deviation (GRPO's paper
      does, Dr. GRPO shows why not to).
    epsilon: Added to that standard deviation.
  """

  advantage: str = 'grpo'
  normalize_std: bool = False
  epsilon: float = 1e-6

  def __post_init__(self):
    if self.epsilon <= 0:
      raise ValueError(f'epsilon={self.epsilon} must be above 0 (1e-6)')


@dataclasses.dataclass(frozen=True)
class LossOptions:
  """What a loss reads.

  Attributes:
    loss: Key of LOSSES.
    clip_low: The ratio's lower bound is 1 - clip_low; None: see CLIP_BOUNDS.
    clip_high: Its upper bound is 1 + clip_high; None: see CLIP_BOUNDS.
    dual_clip: ppo_clip's bound on a negative advantage's ratio, 0 for none.
    aggregation: One of aggregate.AGGREGATIONS; None: token-mean.
    norm_length: Constant length in tokens of seq-mean-token-sum-norm.
    kl: One of kl.KL_KINDS, or 'none'.
    kl_coef: Coefficient of the KL to the reference policy.
    kl_placement: 'loss', or 'reward' to take it off the token rewards.
    kl_importance: Multiply the KL in the loss by the ratio to the old policy.
    entropy_coef: Coefficient of the entropy bonus.
  """

  loss: str = 'ppo_clip'
  clip_low: float | None = None
  clip_high: float | None = None
  dual_clip: float = 10.0
  aggregation: str | None = None
  norm_length: float = 0.0
  kl: str = 'none'
  kl_coef: float = 1e-3
  kl_placement: str = 'loss'
  kl_importance: bool = False
  entropy_coef: float = 0.0

  def __post_init__(self):
    _check_choice('loss', self.loss, CLIP_BOUNDS)
    low, high = CLIP_BOUNDS[self.loss]
    _fill(self, 'clip_low', low)
    _fill(self, 'clip_high', high)
    _fill(self, 'aggregation', 'token-mean')
    if self.clip_low < 0 or self.clip_high < 0:
      raise ValueError(
          f'clip_low={self.clip_low} and clip_high={self.clip_high} are '
          'distances from a ratio of 1 and cannot be negative'
      )
    if self.dual_clip != 0 and self.dual_clip <= 1:
      raise ValueError(
          f'dual_clip={self.dual_clip} must be above 1 (3 to 10), or 0 for none'
      )
    _check_choice('aggregation', self.aggregation, aggregate.AGGREGATIONS)
    if self.aggregation == 'seq-mean-token-sum-norm' and self.norm_length <= 0:
      raise ValueError(
          f'seq-mean-token-sum-norm got norm_length={self.norm_length}: set it '
          'to the most action tokens that a row may have'
      )
    _check_choice('kl', self.kl, ('none', *kl.KL_KINDS))
    _check_choice('kl_placement', self.kl_placement, ('loss', 'reward'))
    if self.kl_coef < 0 or self.entropy_coef < 0:
      raise ValueError(
          f'kl_coef={self.kl_coef} and entropy_coef={self.entropy_coef} '
          'cannot be negative'
      )
    if self.kl == 'k1' and self.kl_placement == 'loss':
      raise ValueError(
          "kl='k1' in the loss has an expected gradient of zero: use k2, k3 or "
          "'k1+', or kl_placement='reward'"
      )
    if self.kl_placement == 'reward' and self.kl.endswith('+'):
      raise ValueError(
          f'kl={self.kl!r} is a gradient estimator and rewards have none: use '
          f'{self.kl[:-1]!r}'
      )
    if self.kl_placement == 'reward' and self.kl_importance:
      raise ValueError(
          'kl_importance weighs the KL in the loss by the ratio; with '
          "kl_placement='reward' there is no ratio: set it to False"
      )
    if self.loss == 'sft' and self.kl_placement == 'reward':
      raise ValueError("loss='sft' reads no reward: put the KL in the loss")


@dataclasses.dataclass(frozen=True)
class AlgorithmOptions(LossOptions, AdvantageOptions):
  """Every key of `config.algorithm`; see the classes that it joins."""

  def __post_init__(self):
    AdvantageOptions.__post_init__(self)
    LossOptions.__post_init__(self)


def _check_choice(name: str, value: str, choices) -> None:
  if value not in choices:
    raise ValueError(f'{name}={value!r} is none of {", ".join(choices)}')


def _fill(options, name: str, value) -> None:
  if getattr(options, name) is None:
    object.__setattr__(options, name, value)
