"""Options of the algorithms room: frozen, validated, static under jit.

`AlgorithmOptions(**config.algorithm)` holds every key; estimators and losses
are typed by the part that they read.  Leaves out how updates are scheduled
(train) and which episodes are kept (`filters.FilterOptions`).  Invariant:
after construction every value is concrete (None has been replaced by what the
paper of the chosen loss, estimator or correction sets) and the combination
means something.
"""

from __future__ import annotations

import dataclasses

from agent_rl_jax.algorithms import aggregate, kl
from agent_rl_jax.algorithms.choices import (
    AGGREGATION,
    BASELINES,
    CLIP_BOUNDS,
    CORRECTION_BOUNDS,
    ESTIMATORS,
    REJECTION_BOUNDS,
    ROW_LOSSES,
)

# Estimators that read no token rewards, off which a KL could be taken, and why.
WITHOUT_TOKEN_REWARDS = {
    'gdpo': 'normalizes each reward component by itself, and a KL is none',
    'mt_grpo': (
        'credits the sum of turn rewards and what the return holds beyond it,'
        ' each normalized in its group; a KL of single tokens is in neither'
    ),
}


@dataclasses.dataclass(frozen=True)
class KlOptions:
  """The KL to the reference policy.

  Attributes:
    kl: One of kl.KL_KINDS, or 'none'.
    kl_coef: Its coefficient; the first one if it adapts.
    kl_placement: 'loss', or 'reward' to take it off the token rewards.
    kl_importance: Multiply the KL in the loss by the ratio to the old policy;
      k1 and k3, whose expected gradient then is the KL's.
    kl_adaptive: Move the coefficient towards `kl_target`.
    kl_target: Nats per token that the adaptive coefficient aims at.
    kl_horizon: Episodes over which it adapts.
  """

  kl: str = 'none'
  kl_coef: float = 1e-3
  kl_placement: str = 'loss'
  kl_importance: bool = False
  kl_adaptive: bool = False
  kl_target: float = 0.1
  kl_horizon: float = 10000.0

  def __post_init__(self):
    _check_choice('kl', self.kl, ('none', *kl.KL_KINDS))
    _check_choice('kl_placement', self.kl_placement, ('loss', 'reward'))
    _check_positive(self, 'kl_target', 'kl_horizon')
    if self.kl_coef < 0:
      raise ValueError(f'kl_coef={self.kl_coef} cannot be negative')
    in_reward = self.kl_placement == 'reward'
    if self.kl == 'k1' and not in_reward and not self.kl_importance:
      raise ValueError(
          "kl='k1' in the loss has an expected gradient of zero: use k2, k3, "
          "'k1+' or kl_importance=True, or kl_placement='reward'"
      )
    if in_reward and self.kl.endswith('+'):
      raise ValueError(
          f'kl={self.kl!r} is a gradient estimator and rewards have none: use '
          f'{self.kl[:-1]!r}'
      )
    if in_reward and self.kl_importance:
      raise ValueError(
          'kl_importance weighs the KL in the loss by the ratio; with '
          "kl_placement='reward' there is no ratio: set it to False"
      )
    if self.kl_importance and self.kl not in ('none', 'k1', 'k3'):
      raise ValueError(
          f'kl_importance with kl={self.kl!r}: the ratio has a gradient too, '
          "which makes the expected gradient that of the KL for 'k1' and 'k3' "
          'alone: use one of them, or kl_importance=False'
      )
    if self.kl_adaptive and self.kl == 'none':
      raise ValueError('kl_adaptive adapts nothing with kl=none: choose a kl')
    if self.kl_adaptive and self.kl_coef == 0:
      raise ValueError(
          'kl_adaptive multiplies the coefficient, so kl_coef=0 stays 0: give '
          'kl_coef a first value'
      )


@dataclasses.dataclass(frozen=True)
class AdvantageOptions(KlOptions):
  """What an estimator reads.

  Attributes:
    advantage: Key of ADVANTAGES.
    normalize_std: Divide by the standard deviation (grpo, gigpo, mt_grpo: of
      the group; reinforce: of all past samples).
    epsilon: Added to that standard deviation.
    gamma: Discount per sampled token, or per turn (turn_gae, turn_return,
      gigpo).
    lam: GAE's lambda.
    high_gamma: bi_level_gae's discount from turn to turn.
    whiten: Whiten the GAE estimators' advantages over the batch's tokens.
    turn_rewards: Credit the environment's turn rewards to their turns instead
      of the end of the episode.
    turn_coef: mt_grpo's weight of the turn advantage.
    step_coef: gigpo's weight of the step advantage.
    similarity: gigpo: how alike, in (0, 1], the texts of two states must be to
      be one anchor state (`anchors.group_anchors`); 0: equal keys.
    pooled: gigpo: count an episode once per turn, as the reference code does.
    component_weights: gdpo's weight of each reward component; () for all 1,
      but a run fills in `rewards.weights`.
    baseline: reinforce's running baseline, one of BASELINES.
    baseline_decay: Of the 'exponential' baseline.
    baseline_window: Batches of the 'window' baseline.
  """

  advantage: str = 'grpo'
  normalize_std: bool = False
  epsilon: float = 1e-6
  gamma: float = 1.0
  lam: float = 1.0
  high_gamma: float = 0.95
  whiten: bool = True
  turn_rewards: bool = True
  turn_coef: float = 1.0
  step_coef: float = 1.0
  similarity: float = 0.0
  pooled: bool = False
  component_weights: tuple[float, ...] = ()
  baseline: str = 'batch_mean'
  baseline_decay: float = 0.9
  baseline_window: int = 10

  def __post_init__(self):
    super().__post_init__()
    _check_choice('advantage', self.advantage, ESTIMATORS)
    _check_positive(self, 'epsilon', 'baseline_window')
    for name in ('gamma', 'lam', 'high_gamma', 'baseline_decay', 'similarity'):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f'{name}={getattr(self, name)} must lie in [0, 1]')
    _check_choice('baseline', self.baseline, BASELINES)
    # Lists come from configs; options must hash.
    object.__setattr__(self, 'component_weights', tuple(self.component_weights))
    why = WITHOUT_TOKEN_REWARDS.get(self.advantage)
    if why and self.kl != 'none' and self.kl_placement == 'reward':
      raise ValueError(
          f"kl_placement='reward' with advantage={self.advantage!r}, which"
          f" {why}: set kl_placement='loss'"
      )
    if self.advantage == 'dr_grpo' and self.normalize_std:
      raise ValueError(
          'dr_grpo is GRPO without the standard deviation: set '
          "normalize_std=False, or advantage='grpo'"
      )


@dataclasses.dataclass(frozen=True)
class LossOptions(KlOptions):
  """What the policy and value losses read.

  Attributes:
    loss: Key of LOSSES.
    clip_low: The ratio's lower bound is 1 - clip_low; None: see CLIP_BOUNDS.
    clip_high: Its upper bound is 1 + clip_high; None: see CLIP_BOUNDS.
    dual_clip: ppo_clip's bound on a negative advantage's ratio, 0 for none.
    sapo_positive: sapo's temperature for positive advantages.
    sapo_negative: sapo's temperature for the others.
    aggregation: One of aggregate.AGGREGATIONS; None: see AGGREGATION.
    norm_length: Constant length in tokens of seq-mean-token-sum-norm.
    opsm_delta: Drop negative-advantage tokens of rows whose mean log-ratio
      old to new exceeds it; 0 for never.
    entropy_coef: Coefficient of the entropy bonus.
    value_clip: How far a value may move from the old one; 0 for any.
  """

  loss: str = 'ppo_clip'
  clip_low: float | None = None
  clip_high: float | None = None
  dual_clip: float = 10.0
  sapo_positive: float = 1.0
  sapo_negative: float = 1.05
  aggregation: str | None = None
  norm_length: float = 0.0
  opsm_delta: float = 0.0
  entropy_coef: float = 0.0
  value_clip: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    _check_choice('loss', self.loss, CLIP_BOUNDS)
    _fill(self, ('clip_low', 'clip_high'), CLIP_BOUNDS[self.loss])
    _fill(self, ('aggregation',), (AGGREGATION[self.loss],))
    for name in ('clip_low', 'clip_high', 'opsm_delta', 'value_clip'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name}={getattr(self, name)} cannot be negative')
    if self.entropy_coef < 0:
      raise ValueError(f'entropy_coef={self.entropy_coef} cannot be negative')
    if self.dual_clip != 0 and self.dual_clip <= 1:
      raise ValueError(
          f'dual_clip={self.dual_clip} must be above 1 (3 to 10), or 0 for none'
      )
    _check_positive(self, 'sapo_positive', 'sapo_negative')
    _check_choice('aggregation', self.aggregation, aggregate.AGGREGATIONS)
    if self.aggregation == 'seq-mean-token-sum-norm' and self.norm_length <= 0:
      raise ValueError(
          f'seq-mean-token-sum-norm got norm_length={self.norm_length}: set it '
          'to the most action tokens that a row may have'
      )
    if self.loss in ROW_LOSSES and self.aggregation != 'seq-mean-token-mean':
      raise ValueError(
          f'loss={self.loss!r} gives one value per row, so aggregation='
          f'{self.aggregation!r} would weigh rows by length: leave it None or '
          "set 'seq-mean-token-mean'"
      )
    if self.loss == 'sft' and self.kl_placement == 'reward':
      raise ValueError("loss='sft' reads no reward: put the KL in the loss")
    if self.loss == 'sft' and self.opsm_delta:
      raise ValueError("loss='sft' reads no advantage: set opsm_delta=0")


@dataclasses.dataclass(frozen=True)
class CorrectionOptions:
  """What `corrections` reads: sampler and trainer disagree.

  Attributes:
    correction: Importance weight on the per-token loss, key of
      CORRECTION_BOUNDS.
    correction_low: Lower bound of the weight; None: see CORRECTION_BOUNDS.
    correction_high: Upper bound of the weight; None: see CORRECTION_BOUNDS.
    correction_normalize: Divide the weights by their mean.
    rejection: Which tokens or rows to leave out, key of REJECTION_BOUNDS.
    rejection_low: Lower bound; None: see REJECTION_BOUNDS.
    rejection_high: Upper bound; None: see REJECTION_BOUNDS.
    rejection_denominator: 'kept' to count only what is kept, 'original' to
      keep rejected tokens in the loss's denominator.  Either way advantages
      are made before, from all sampled tokens: verl's are made of what it
      keeps, which differs where they are whitened or carried back over tokens.
  """

  correction: str = 'none'
  correction_low: float | None = None
  correction_high: float | None = None
  correction_normalize: bool = False
  rejection: str = 'none'
  rejection_low: float | None = None
  rejection_high: float | None = None
  rejection_denominator: str = 'kept'

  def __post_init__(self):
    _check_choice('correction', self.correction, CORRECTION_BOUNDS)
    _check_choice('rejection', self.rejection, REJECTION_BOUNDS)
    _fill(
        self,
        ('correction_low', 'correction_high'),
        CORRECTION_BOUNDS[self.correction],
    )
    _fill(
        self,
        ('rejection_low', 'rejection_high'),
        REJECTION_BOUNDS[self.rejection],
    )
    for name in ('correction', 'rejection'):
      low = getattr(self, f'{name}_low')
      high = getattr(self, f'{name}_high')
      if not 0 <= low <= high:
        raise ValueError(
            f'{name}_low={low} and {name}_high={high}: 0 <= low <= high'
        )
    _check_choice(
        'rejection_denominator',
        self.rejection_denominator,
        ('kept', 'original'),
    )
    if self.correction_normalize and self.correction == 'none':
      raise ValueError('correction_normalize needs a correction to normalize')


@dataclasses.dataclass(frozen=True)
class AlgorithmOptions(LossOptions, AdvantageOptions, CorrectionOptions):
  """Every key of `config.algorithm`; see the classes that it joins."""

  def __post_init__(self):
    CorrectionOptions.__post_init__(self)
    # Its aggregation goes before the loss's, unless the loss allows but one.
    constant = self.advantage == 'dr_grpo' and self.loss not in ROW_LOSSES
    if constant and self.aggregation is None:
      if self.norm_length <= 0:
        raise ValueError(
            'dr_grpo sums over each row and divides by a constant: set '
            'norm_length to the most action tokens that a row may have, or '
            'name another aggregation'
        )
      _fill(self, ('aggregation',), ('seq-mean-token-sum-norm',))
    super().__post_init__()
    if self.loss == 'sft' and self.correction != 'none':
      raise ValueError(
          "loss='sft' fits data that no sampler drew: set correction='none'"
      )


def refuse_double_correction(options: CorrectionOptions, old: str) -> None:
  """Raises ValueError if the mismatch would be corrected twice.

  Args:
    options: The corrections.
    old: Where old log-probs come from, 'recompute' or 'sampler'.
  """
  if old == 'sampler' and options.correction != 'none':
    raise ValueError(
        "old_logprobs='sampler' makes the ratio of the loss hold the whole "
        f'mismatch already, so correction={options.correction!r} would count '
        "it twice: set correction='none', or old_logprobs='recompute'"
    )
  if old == 'sampler' and options.rejection != 'none':
    raise ValueError(
        "old_logprobs='sampler' leaves nothing to compare, so rejection="
        f"{options.rejection!r} rejects nothing: set old_logprobs='recompute'"
    )


def _check_choice(name: str, value: str, choices) -> None:
  if value not in choices:
    raise ValueError(f'{name}={value!r} is none of {", ".join(choices)}')


def _check_positive(options, *names: str) -> None:
  for name in names:
    if getattr(options, name) <= 0:
      raise ValueError(f'{name}={getattr(options, name)} must be above 0')


def _fill(options, names: tuple[str, ...], values: tuple) -> None:
  for name, value in zip(names, values, strict=True):
    if getattr(options, name) is None:
      object.__setattr__(options, name, value)
