"""Options of the training room: how long, how many, how often.

Sizes are counts of prompts, samples, updates, rows or tokens as the attribute
says.  Leaves out what the loop derives from them (`settings.derived`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from agent_rl_jax.models.value import CRITICS

OLD_LOGPROBS = ('recompute', 'sampler')
ADMITTED = ('kept', 'mixed')


def _at_least(section: str, options: object, least: int, *names: str) -> None:
  for name in names:
    value = getattr(options, name)
    if value < least:
      raise ValueError(f'{section}.{name}={value} must be at least {least}')


def _check_lengths(section: str, lengths: tuple[int, ...]) -> None:
  if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
    raise ValueError(
        f'{section}.pack_len={lengths}: give one or more different lengths, as'
        ' (256,)'
    )


@dataclasses.dataclass(frozen=True)
class TrainOptions:
  """One RL run.

  Attributes:
    iterations: Rollout batches to train on; 0 skips RL.
    prompts: Tasks of a rollout batch.
    samples: Episodes of each task: its group.
    epochs: Passes over a rollout batch.
    mini_batches: Updates of one pass; whole groups go into each.
    micro_batch: Rows of one forward and backward pass.
    pack_len: Tokens of such a row, in which short episodes are packed side
      by side; several lengths are all compiled, and the shortest that holds
      the batch's longest episode is used.
    lr: Peak learning rate of RL.
    old_logprobs: 'recompute' with the training policy, or 'sampler' to take
      those that the engine recorded.
  """

  iterations: int
  prompts: int
  samples: int
  epochs: int
  mini_batches: int
  micro_batch: int
  pack_len: tuple[int, ...]
  lr: float
  old_logprobs: str

  def __post_init__(self):
    _at_least('train', self, 0, 'iterations')
    _at_least('train', self, 1, 'prompts', 'samples', 'epochs')
    _at_least('train', self, 1, 'mini_batches', 'micro_batch')
    _check_lengths('train', self.pack_len)
    if not self.lr > 0:
      raise ValueError(f'train.lr={self.lr} must be above 0')
    if self.old_logprobs not in OLD_LOGPROBS:
      raise ValueError(
          f'train.old_logprobs={self.old_logprobs!r}: one of {OLD_LOGPROBS}'
      )


@dataclasses.dataclass(frozen=True)
class OverlongOptions:
  """What long and truncated episodes cost.

  Attributes:
    penalty: Taken off the return at the limit, and of any episode that a limit
      on tokens truncated; 0 for none.
    buffer: Sampled tokens before the limit over which the penalty grows.
    limit: Sampled tokens at which the whole penalty applies; 0 stands for
      `rollout.max_episode_tokens`.
    mask: Leave truncated episodes out of the loss.
  """

  penalty: float
  buffer: int
  limit: int
  mask: bool

  def __post_init__(self):
    _at_least('overlong', self, 0, 'penalty', 'limit')
    _at_least('overlong', self, 1, 'buffer')


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
  """Groups that are trained on again.

  Attributes:
    capacity: Groups kept from earlier batches; 0 for no replay.
    share: Of a batch's groups that may be replayed, rounded down.
    max_age: Iterations since a group was sampled, at most.
    admit: 'kept' takes every fresh group that was trained on, 'mixed' those
      of them whose metric differs inside.
  """

  capacity: int
  share: float
  max_age: int
  admit: str

  def __post_init__(self):
    _at_least('replay', self, 0, 'capacity')
    _at_least('replay', self, 1, 'max_age')
    if not 0 < self.share < 1:
      raise ValueError(
          f'replay.share={self.share} must lie between 0 and 1; for no replay'
          ' set replay.capacity=0'
      )
    if self.admit not in ADMITTED:
      raise ValueError(
          f'replay.admit={self.admit!r} is none of {", ".join(ADMITTED)}'
      )

  def groups(self, prompts: int) -> int:
    """Groups of a batch of `prompts` that may be replayed; never all."""
    # Rounding first: 0.29 * 100 is 28.999... in binary.
    most = math.floor(round(self.share * prompts, 9))
    return min(most, prompts - 1)


@dataclasses.dataclass(frozen=True)
class CriticOptions:
  """The critic.

  Attributes:
    kind: One of `models.value.CRITICS`.
    lr: Peak learning rate.
    warmup_updates: First updates of the run, in which the critic alone moves.
    value_coef: Of the value loss in the sum of losses.
    stop_gradient: Keep the value loss away from a shared trunk.
  """

  kind: str = 'none'
  lr: float = 1e-3
  warmup_updates: int = 0
  value_coef: float = 1.0
  stop_gradient: bool = False

  def __post_init__(self):
    if self.kind not in CRITICS:
      raise ValueError(
          f'critic.kind={self.kind!r} is none of {", ".join(CRITICS)}'
      )
    _at_least('critic', self, 0, 'warmup_updates')
    for name in ('lr', 'value_coef'):
      if not getattr(self, name) > 0:
        raise ValueError(f'critic.{name}={getattr(self, name)} must be above 0')
    if self.stop_gradient and self.kind != 'shared':
      raise ValueError(
          f'critic.stop_gradient with critic.kind={self.kind!r}: only a shared'
          ' trunk sees the value loss; unset it'
      )


@dataclasses.dataclass(frozen=True)
class SftOptions:
  """The cold start.

  Attributes:
    exercise_steps: Updates on short exercises, first.
    steps: Updates on demonstrations, after them.
    batch: Demonstrations of one update.
    micro_batch: Rows of one forward and backward pass.
    pack_len: Tokens of such a row; several as in TrainOptions.
    lr: Peak learning rate.
    warn_below: Warn when the mean reward sampled before RL is below it.
  """

  exercise_steps: int
  steps: int
  batch: int
  micro_batch: int
  pack_len: tuple[int, ...]
  lr: float
  warn_below: float

  def __post_init__(self):
    _at_least('sft', self, 0, 'exercise_steps', 'steps')
    _at_least('sft', self, 1, 'batch', 'micro_batch')
    _check_lengths('sft', self.pack_len)
    if not self.lr > 0:
      raise ValueError(f'sft.lr={self.lr} must be above 0')


@dataclasses.dataclass(frozen=True)
class EvalOptions:
  """Evaluation on held-out problems.

  Attributes:
    every: Iterations between evaluations; 0 evaluates at the end only.
    problems: Held-out problems of an evaluation during training.
    final_problems: Held-out problems of the comparison at the end.
    samples: Episodes of each problem.
    temperature: Of the sampling; 0 is greedy.
    without_tool: Also train the same cold start without any tool.
  """

  every: int
  problems: int
  final_problems: int
  samples: int
  temperature: float
  without_tool: bool

  def __post_init__(self):
    _at_least('eval', self, 0, 'every', 'problems', 'final_problems')
    _at_least('eval', self, 1, 'samples')
    if not self.temperature >= 0:
      raise ValueError(f'eval.temperature={self.temperature} is below 0')


@dataclasses.dataclass(frozen=True)
class ReportOptions:
  """What a run writes for people.

  Attributes:
    jsonl: Write metrics.jsonl.
    tensorboard: Write TensorBoard event files.
    trajectories_every: Iterations between trajectory samples; 0 for none.
    trajectories: Episodes of such a sample, at most.
    html: Also write the sample as a page.
    curves: Draw curves.png.
    progress: Show the progress bar.
    log_every: Iterations between progress lines where there is no terminal.
  """

  jsonl: bool
  tensorboard: bool
  trajectories_every: int
  trajectories: int
  html: bool
  curves: bool
  progress: bool
  log_every: int

  def __post_init__(self):
    _at_least('report', self, 0, 'trajectories_every', 'trajectories')
    _at_least('report', self, 1, 'log_every')


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
  """Saving.

  Attributes:
    every: Iterations between checkpoints; the cold start has its own pace.
    keep: Checkpoints kept, the newest ones.
  """

  every: int
  keep: int

  def __post_init__(self):
    _at_least('checkpoint', self, 1, 'every', 'keep')


@dataclasses.dataclass(frozen=True)
class RewardOptions:
  """What is rewarded.

  Attributes:
    names: Reward components, keys of REWARDS.
    weights: Weight of each in the total; 0 records it only.
    metric: The component that measures success, whatever its weight.
  """

  names: tuple[str, ...]
  weights: tuple[float, ...]
  metric: str

  def __post_init__(self):
    if len(self.names) != len(self.weights) or not self.names:
      raise ValueError(
          f'rewards.names={self.names} and rewards.weights={self.weights} must'
          ' be equally many, and at least one'
      )
    if len(set(self.names)) < len(self.names):
      raise ValueError(f'rewards.names={self.names} repeats a name')
    for name, weight in zip(self.names, self.weights, strict=True):
      if not math.isfinite(weight):
        raise ValueError(f'rewards: weight of {name!r} is {weight}')

  def by_name(self) -> Mapping[str, float]:
    """{component: weight}, as RewardSet takes it."""
    return dict(zip(self.names, self.weights, strict=True))


@dataclasses.dataclass(frozen=True)
class TokenizerOptions:
  """Which tokenizer.

  Attributes:
    kind: Key of TOKENIZERS.
    path: Its file; '' with 'sentencepiece' trains one into the run folder,
      and with 'gguf' reads that of `weights.path`.
    vocab_size: Pieces of a sentencepiece model that is trained.
    corpus: Texts that it is trained on.
  """

  kind: str
  path: str
  vocab_size: int
  corpus: int

  def __post_init__(self):
    _at_least('tokenizer', self, 1, 'vocab_size', 'corpus')


@dataclasses.dataclass(frozen=True)
class WeightsOptions:
  """Where the first parameters come from.

  Attributes:
    path: GGUF file, folder with config.json and safetensors, 'package:NAME',
      or '' to begin from random parameters.
  """

  path: str
