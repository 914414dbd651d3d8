"""From one config to every room's options, checked against each other.

`resolve` is the only reader of a config: each key ends in exactly one options
field, so a key that nobody reads cannot exist.  Leaves out building anything.
Invariant: a Settings that exists can be run; what is impossible has raised
with the rule that it breaks, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from agent_rl_jax.algorithms import choices, filters
from agent_rl_jax.algorithms.advantages import NEEDS_GREEDY_BASELINE
from agent_rl_jax.algorithms.filters import FilterOptions
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.data.demonstrations import DemonstrationOptions
from agent_rl_jax.data.tasks import DataOptions
from agent_rl_jax.envs.registry import ENVS
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.mesh import MeshOptions
from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.text.chat import CHATS
from agent_rl_jax.text.tag_chat import TagOptions
from agent_rl_jax.text.template_chat import TemplateOptions
from agent_rl_jax.text.tokenizers import TOKENIZERS
from agent_rl_jax.tools import TOOLS
from agent_rl_jax.tools.sandbox.options import SandboxOptions
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import options, rules
from agent_rl_jax.train.optimizer import OptimizerOptions
from agent_rl_jax.train.watch import WatchOptions

_CHAT_OPTIONS = {'tags': TagOptions, 'template': TemplateOptions}

# Fields of the model that a checkpoint leaves open.
_OPEN = ('dtype', 'param_dtype', 'remat', 'head_megabytes')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Options of every room, and the few keys that belong to none.

  Attributes:
    model: Fields of ModelConfig; `model_config` completes them.
    chat: Keyword options of the chat format `chat_kind`.
    env: Options of the environment `env_name`.
    tools: Names of the tools, in the order in which the agent sees them.
    tool_workers: Threads that run tool calls.
    python: Limits of the Python tool.
    eval_data: Held-out tasks.
    total_updates: Optimizer updates of the RL run.
    Others: as their classes say.
  """

  seed: int
  run_dir: str
  model: Mapping[str, Any]
  weights: options.WeightsOptions
  tokenizer: options.TokenizerOptions
  chat_kind: str
  chat: Mapping[str, Any]
  data: DataOptions
  eval_data: DataOptions
  env_name: str
  env: Any
  tools: tuple[str, ...]
  tool_workers: int
  python: SandboxOptions
  rewards: options.RewardOptions
  rollout: RolloutOptions
  algorithm: AlgorithmOptions
  filter: FilterOptions
  overlong: options.OverlongOptions
  replay: options.ReplayOptions
  optimizer: OptimizerOptions
  critic: options.CriticOptions
  critic_optimizer: OptimizerOptions
  train: options.TrainOptions
  sft: options.SftOptions
  sft_optimizer: OptimizerOptions
  demonstrations: DemonstrationOptions
  eval: options.EvalOptions
  watch: WatchOptions
  checkpoint: options.CheckpointOptions
  mesh: MeshOptions
  report: options.ReportOptions

  @property
  def total_updates(self) -> int:
    train = self.train
    return train.iterations * train.epochs * train.mini_batches

  def model_config(self, vocab_size: int) -> ModelConfig:
    """The model from scratch, for a tokenizer of `vocab_size` tokens."""
    return config_lib.section(self.model, ModelConfig, vocab_size=vocab_size)

  def model_overrides(self) -> dict[str, Any]:
    """What the config decides about a model read from `weights.path`."""
    return {name: self.model[name] for name in _OPEN}


def _choice(kind: str, section: str, name: str, table) -> None:
  if name not in table:
    near = config_lib.nearest(name, list(table))
    hint = f'did you mean {near!r}?' if near else f'one of {sorted(table)}'
    raise ValueError(f'{section}={name!r} is no {kind}: {hint}')


def _without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
  return {key: value for key, value in config.items() if key not in names}


def _set_but_unread(
    section: str, config: Mapping[str, Any], base: Mapping[str, Any], read, why
) -> None:
  """Raises when keys outside `read` were changed from the base."""
  for key, value in config.items():
    if key not in read and value != base[key]:
      raise ValueError(
          f'{section}.{key}={value!r} is not used: {why}; leave it at'
          f' {base[key]!r}'
      )


def _chat(config: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
  kind = config['kind']
  for other in _CHAT_OPTIONS:
    if other != kind:
      why = f'chat.kind is {kind!r}'
      _set_but_unread(f'chat.{other}', config[other], base[other], (), why)
  values = dict(config[kind].items())
  if 'variables' in values:
    values['variables'] = dict(values['variables'])
  made = config_lib.section(values, _CHAT_OPTIONS[kind])
  return {
      field.name: getattr(made, field.name)
      for field in dataclasses.fields(made)
  }


def _data(config: Mapping[str, Any], base: Mapping[str, Any], env: str):
  # The base's split suits its own kind; others that read none must not see it.
  if config['kind'] != base['kind'] and config['split'] == base['split']:
    config = _without(config, 'split')
  return config_lib.section(config, DataOptions, env=env)


def _critic(config: Mapping[str, Any], base: Mapping[str, Any]):
  if config['kind'] == 'none':
    _set_but_unread(
        'critic',
        config_lib.flatten(config),
        config_lib.flatten(base),
        ('kind',),
        "critic.kind is 'none'",
    )
  return config_lib.section(
      _without(config, 'optimizer'), options.CriticOptions
  )


def _algorithm(
    config: Mapping[str, Any],
    base: Mapping[str, Any],
    rewards: options.RewardOptions,
    critic: options.CriticOptions,
):
  values = dict(config.items())
  if config['advantage'] == 'gdpo' and not config['component_weights']:
    values['component_weights'] = rewards.weights
  made = config_lib.section(values, AlgorithmOptions)
  # What a key without a value of its own is filled with, which is how a value
  # that a config sets can be taken back on the command line.
  base = dict(base.items())
  for names, bounds in (
      (('clip_low', 'clip_high'), choices.CLIP_BOUNDS[made.loss]),
      (
          ('correction_low', 'correction_high'),
          choices.CORRECTION_BOUNDS[made.correction],
      ),
      (
          ('rejection_low', 'rejection_high'),
          choices.REJECTION_BOUNDS[made.rejection],
      ),
  ):
    for name, bound in zip(names, bounds, strict=True):
      if config[name] is not None:
        base[name] = bound
  unread = set()
  for choice, table in choices.READ.items():
    if choice in unread:
      continue
    chosen = getattr(made, choice)
    about = set().union(*table.values())
    _set_but_unread(
        'algorithm',
        {key: value for key, value in config.items() if key in about},
        base,
        table[chosen],
        f'algorithm.{choice} is {chosen!r}',
    )
    unread |= about.difference(table[chosen])
  if critic.kind == 'none':
    why = "critic.kind is 'none'"
    clip = {'value_clip': config['value_clip']}
    _set_but_unread('algorithm', clip, base, (), why)
  return made


def _filter(config: Mapping[str, Any], base: Mapping[str, Any]):
  made = config_lib.section(config, FilterOptions)
  read = ('name', *filters.READ[made.name])
  _set_but_unread('filter', config, base, read, f'filter.name is {made.name!r}')
  return made


def _overlong(config: Mapping[str, Any], base: Mapping[str, Any]):
  made = config_lib.section(config, options.OverlongOptions)
  if made.penalty == 0:
    why = 'overlong.penalty is 0'
    _set_but_unread('overlong', config, base, ('penalty', 'mask'), why)
  return made


def _replay(config: Mapping[str, Any], base: Mapping[str, Any]):
  made = config_lib.section(config, options.ReplayOptions)
  if made.capacity == 0:
    why = 'replay.capacity is 0'
    _set_but_unread('replay', config, base, ('capacity',), why)
  return made


def resolve(config: Mapping[str, Any], base: Mapping[str, Any]) -> Settings:
  """Builds and checks the settings of a run.

  Args:
    config: A run's config.
    base: `configs.base.get_config()`: every key, with its default.

  Raises:
    ValueError: unknown, missing or unused keys with the nearest valid one,
      values that a room refuses, or a combination that breaks a rule.
  """
  config_lib.check_keys(config, base)
  section = config_lib.section
  _choice(
      'tokenizer', 'tokenizer.kind', config['tokenizer']['kind'], TOKENIZERS
  )
  _choice('chat format', 'chat.kind', config['chat']['kind'], CHATS)
  _choice('environment', 'env.name', config['env']['name'], ENVS)
  for name in config['tools']['names']:
    _choice('tool', 'tools.names', name, TOOLS)
  rewards = section(config['rewards'], options.RewardOptions)
  for name in (*rewards.names, rewards.metric):
    _choice('reward', 'rewards', name, REWARDS)
  weights = section(config['weights'], options.WeightsOptions)
  if weights.path:
    _set_but_unread(
        'model',
        config['model'],
        base['model'],
        _OPEN,
        'the checkpoint at weights.path decides it',
    )
  env_name = config['env']['name']
  train = section(config['train'], options.TrainOptions)
  sft = section(
      _without(config['sft'], 'optimizer', 'demonstrations'), options.SftOptions
  )
  critic = _critic(config['critic'], base['critic'])
  updates = train.iterations * train.epochs * train.mini_batches
  settings = Settings(
      seed=config['seed'],
      run_dir=config['run_dir'],
      model=dict(config['model'].items()),
      weights=weights,
      tokenizer=section(config['tokenizer'], options.TokenizerOptions),
      chat_kind=config['chat']['kind'],
      chat=_chat(config['chat'], base['chat']),
      data=_data(config['data'], base['data'], env_name),
      eval_data=_data(config['eval']['data'], base['eval']['data'], env_name),
      env_name=env_name,
      env=section(_without(config['env'], 'name'), ENVS[env_name].Options),
      tools=tuple(config['tools']['names']),
      tool_workers=config['tools']['workers'],
      python=section(config['tools']['python'], SandboxOptions),
      rewards=rewards,
      rollout=section(config['rollout'], RolloutOptions),
      algorithm=_algorithm(
          config['algorithm'], base['algorithm'], rewards, critic
      ),
      filter=_filter(config['filter'], base['filter']),
      overlong=_overlong(config['overlong'], base['overlong']),
      replay=_replay(config['replay'], base['replay']),
      optimizer=section(
          config['optimizer'],
          OptimizerOptions,
          lr=train.lr,
          # While the critic warms up, the policy's schedule stands still.
          total=max(
              updates - critic.warmup_updates,
              config['optimizer']['warmup'] + 1,
          ),
      ),
      critic=critic,
      critic_optimizer=section(
          config['critic']['optimizer'],
          OptimizerOptions,
          lr=critic.lr,
          total=max(updates, config['critic']['optimizer']['warmup'] + 1),
      ),
      train=train,
      sft=sft,
      sft_optimizer=section(
          config['sft']['optimizer'],
          OptimizerOptions,
          lr=sft.lr,
          total=max(
              sft.exercise_steps + sft.steps,
              config['sft']['optimizer']['warmup'] + 1,
          ),
      ),
      demonstrations=section(
          config['sft']['demonstrations'], DemonstrationOptions
      ),
      eval=section(_without(config['eval'], 'data'), options.EvalOptions),
      watch=section(config['watch'], WatchOptions),
      checkpoint=section(config['checkpoint'], options.CheckpointOptions),
      mesh=section(config['mesh'], MeshOptions),
      report=section(config['report'], options.ReportOptions),
  )
  if not weights.path:
    settings.model_config(vocab_size=1)
  broken = [
      message for rule in rules.RULES for message in [rule(settings)] if message
  ]
  if broken:
    raise ValueError('\n'.join(broken))
  return settings


def check_devices(settings: Settings, num_devices: int) -> tuple[int, int, int]:
  """Returns the mesh sizes; raises ValueError when they do not fit."""
  sizes = settings.mesh.resolve(num_devices)
  message = rules.shards(settings, sizes)
  if message:
    raise ValueError(message)
  return sizes


def derived(settings: Settings) -> dict[str, int]:
  """Numbers that follow from the config, by what they count."""
  train, sft = settings.train, settings.sft
  episodes = train.prompts * train.samples
  groups = train.prompts // train.mini_batches
  # One of each task, beside those that are trained on.
  greedy = train.prompts
  if settings.algorithm.advantage not in NEEDS_GREEDY_BASELINE:
    greedy = 0
  counts = {'episodes per iteration': episodes}
  if greedy:
    counts['greedy episodes per iteration'] = greedy
  if settings.filter.resamples:
    counts |= {
        f'{name}, at most': settings.filter.tries * count
        for name, count in counts.items()
    }
  return {
      **counts,
      'groups per mini-batch': groups,
      'episodes per mini-batch': groups * train.samples,
      'updates per iteration': train.epochs * train.mini_batches,
      'updates in all': settings.total_updates,
      'episodes in all': train.iterations * episodes,
      'tasks in all': train.iterations * train.prompts,
      'waves of slots per iteration': math.ceil(
          (episodes + greedy) / settings.rollout.slots
      ),
      'cold-start updates': sft.exercise_steps + sft.steps,
      'tokens per micro-batch, at most': train.micro_batch
      * max(train.pack_len),
  }


def describe(settings: Settings) -> str:
  """What to print at start-up: the derived numbers, then cautions."""
  lines = [f'  {name}: {value:,}' for name, value in derived(settings).items()]
  for caution in rules.CAUTIONS:
    message = caution(settings)
    if message:
      lines.append(f'warning: {message}')
  return '\n'.join(lines)
