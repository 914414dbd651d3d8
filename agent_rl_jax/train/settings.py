"""From one config to every room's options, checked against each other.

`resolve` is the only reader of a config: each key ends in exactly one options
field, so a key that nobody reads cannot exist.  Leaves out building anything.
Invariant: a Settings that exists can be run; what is impossible has raised
with the rule that it breaks, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.data.demonstrations import DemonstrationOptions
from agent_rl_jax.data.tasks import DataOptions
from agent_rl_jax.envs.registry import ENVS
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.mesh import MeshOptions
from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.text.chat import CHATS
from agent_rl_jax.text.tokenizers import TOKENIZERS
from agent_rl_jax.tools import TOOLS
from agent_rl_jax.tools.sandbox.options import SandboxOptions
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import options
from agent_rl_jax.train.optimizer import OptimizerOptions

# Fields of the model that a checkpoint leaves open.
_OPEN = ('dtype', 'param_dtype', 'remat', 'head_megabytes')


@dataclasses.dataclass(frozen=True)
class Settings:
  """Options of every room, and the few keys that belong to none.

  Attributes:
    model: Fields of ModelConfig; `model_config` completes them.
    chat: Options of the chat format `chat_kind`.
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
  optimizer: OptimizerOptions
  train: options.TrainOptions
  sft: options.SftOptions
  sft_optimizer: OptimizerOptions
  demonstrations: DemonstrationOptions
  eval: options.EvalOptions
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
          f'{section}.{key}={value!r} is not used: {why}; unset it'
      )


def _data(config: Mapping[str, Any], base: Mapping[str, Any], env: str):
  # The base's split suits its own kind; others that read none must not see it.
  if config['kind'] != base['kind'] and config['split'] == base['split']:
    config = _without(config, 'split')
  return config_lib.section(config, DataOptions, env=env)


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
  updates = train.iterations * train.epochs * train.mini_batches
  settings = Settings(
      seed=config['seed'],
      run_dir=config['run_dir'],
      model=dict(config['model'].items()),
      weights=weights,
      tokenizer=section(config['tokenizer'], options.TokenizerOptions),
      chat_kind=config['chat']['kind'],
      chat=_without(config['chat'], 'kind'),
      data=_data(config['data'], base['data'], env_name),
      eval_data=_data(config['eval']['data'], base['eval']['data'], env_name),
      env_name=env_name,
      env=section(_without(config['env'], 'name'), ENVS[env_name].Options),
      tools=tuple(config['tools']['names']),
      tool_workers=config['tools']['workers'],
      python=section(config['tools']['python'], SandboxOptions),
      rewards=rewards,
      rollout=section(config['rollout'], RolloutOptions),
      algorithm=section(config['algorithm'], AlgorithmOptions),
      optimizer=section(
          config['optimizer'],
          OptimizerOptions,
          lr=train.lr,
          total=max(updates, config['optimizer']['warmup'] + 1),
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
      checkpoint=section(config['checkpoint'], options.CheckpointOptions),
      mesh=section(config['mesh'], MeshOptions),
      report=section(config['report'], options.ReportOptions),
  )
  if not weights.path:
    settings.model_config(vocab_size=1)
  broken = [
      message for rule in RULES for message in [rule(settings)] if message
  ]
  if broken:
    raise ValueError('\n'.join(broken))
  return settings


def _mini_batches(s: Settings) -> str | None:
  if s.train.prompts % s.train.mini_batches:
    return (
        f'train.prompts={s.train.prompts} is not a multiple of'
        f' train.mini_batches={s.train.mini_batches}: whole groups go into each'
        ' mini-batch'
    )


def _group_of_one(s: Settings) -> str | None:
  if s.algorithm.advantage in _GROUPED and s.train.samples < 2:
    return (
        f'train.samples={s.train.samples} with'
        f' algorithm.advantage={s.algorithm.advantage!r}: a group of one has no'
        ' advantage; give at least 2'
    )


# Estimators that compare the members of a group.
_GROUPED = (
    'grpo',
    'dr_grpo',
    'rloo',
    'gdpo',
    'opo',
    'gpg',
    'gigpo',
    'mt_grpo',
    'reinforce_plus_plus_baseline',
)


def _row_length(s: Settings) -> str | None:
  if max(s.train.pack_len) < s.rollout.max_len:
    return (
        f'train.pack_len={s.train.pack_len} cannot hold a row of'
        f' rollout.max_len={s.rollout.max_len} tokens; raise pack_len or lower'
        ' max_len'
    )


def _action_length(s: Settings) -> str | None:
  if s.rollout.max_action_tokens >= s.rollout.max_len:
    return (
        f'rollout.max_action_tokens={s.rollout.max_action_tokens} leaves no'
        f' room for a prompt in rollout.max_len={s.rollout.max_len}'
    )


def _greedy(s: Settings) -> str | None:
  if s.rollout.temperature == 0 and s.train.iterations:
    return (
        'rollout.temperature=0: greedy episodes of a group are all equal and'
        ' teach nothing; give a temperature above 0'
    )


def _mesh_batches(s: Settings) -> str | None:
  if -1 in dataclasses.astuple(s.mesh):
    return None  # known with the devices: `check_devices`
  return _shards(s, (s.mesh.data, s.mesh.fsdp, s.mesh.tensor))


def _shards(s: Settings, sizes: tuple[int, int, int]) -> str | None:
  data, fsdp, tensor = sizes
  for name, rows in (
      ('train.micro_batch', s.train.micro_batch),
      ('sft.micro_batch', s.sft.micro_batch),
  ):
    if rows % (data * fsdp):
      return (
          f'{name}={rows} is not a multiple of mesh data * fsdp ='
          f' {data * fsdp}, over which its rows are split'
      )
  if s.rollout.slots % (data * fsdp):
    return (
        f'rollout.slots={s.rollout.slots} is not a multiple of the'
        f' {data * fsdp} shards of the rollout mesh'
    )
  if not s.weights.path:
    for name in ('num_heads', 'num_kv_heads', 'mlp_width'):
      if s.model[name] % tensor:
        return (
            f'model.{name}={s.model[name]} is not a multiple of'
            f' mesh.tensor={tensor}'
        )


def _deadlines(s: Settings) -> str | None:
  tool = getattr(s.env, 'tool_timeout', 0.0)
  if s.tools and tool >= s.rollout.step_timeout:
    return (
        f'env.tool_timeout={tool} must be below'
        f' rollout.step_timeout={s.rollout.step_timeout}: a slow tool should'
        ' become an observation, not a lost episode'
    )


def _kl(s: Settings) -> str | None:
  algorithm = s.algorithm
  if algorithm.kl == 'none' and algorithm.kl_coef > 0:
    return (
        f"algorithm.kl_coef={algorithm.kl_coef} with algorithm.kl='none' has"
        ' no effect: choose an estimator or set kl_coef to 0'
    )


def _warmup(s: Settings) -> str | None:
  for name, optimizer, updates in (
      ('optimizer', s.optimizer, s.total_updates),
      ('sft.optimizer', s.sft_optimizer, s.sft.exercise_steps + s.sft.steps),
  ):
    if updates and optimizer.warmup >= updates:
      return (
          f'{name}.warmup={optimizer.warmup} is not below the'
          f' {updates} updates of the run'
      )


def _tokenizer(s: Settings) -> str | None:
  kind, path = s.tokenizer.kind, s.tokenizer.path
  if kind == 'bytes' and path:
    return f"tokenizer.path={path!r} is not used by tokenizer.kind='bytes'"
  if kind == 'bpe' and not path:
    return "tokenizer.kind='bpe' needs tokenizer.path, a tokenizer.json"
  if kind == 'gguf' and not (path or s.weights.path):
    return "tokenizer.kind='gguf' needs tokenizer.path or weights.path"
  if kind in ('bytes', 'sentencepiece') and s.weights.path and not path:
    return (
        f'tokenizer.kind={kind!r} cannot fit the checkpoint at'
        f' weights.path={s.weights.path!r}: give its own tokenizer'
    )


def _cold_start(s: Settings) -> str | None:
  if (s.sft.steps or s.sft.exercise_steps) and s.data.kind != 'word_problems':
    return (
        f'sft.steps={s.sft.steps} with data.kind={s.data.kind!r}: demonstrations'
        " exist for 'word_problems' only; set sft.steps and sft.exercise_steps"
        ' to 0'
    )


def _held_out(s: Settings) -> str | None:
  ours, theirs = s.data, s.eval_data
  if s.eval.problems + s.eval.final_problems == 0:
    return None
  if ours.kind == theirs.kind and all(
      getattr(ours, key) == getattr(theirs, key)
      for key in ('split', 'path', 'dataset')
  ):
    return (
        f'data and eval.data are the same {ours.kind} tasks: evaluation would'
        ' not be held out; change eval.data.split or eval.data.path'
    )


# Each returns the rule that is broken, worded for the one who broke it.
RULES: tuple[Callable[[Settings], str | None], ...] = (
    _mini_batches,
    _group_of_one,
    _row_length,
    _action_length,
    _greedy,
    _mesh_batches,
    _deadlines,
    _kl,
    _warmup,
    _tokenizer,
    _cold_start,
    _held_out,
)


def check_devices(settings: Settings, num_devices: int) -> tuple[int, int, int]:
  """Returns the mesh sizes; raises ValueError when they do not fit."""
  sizes = settings.mesh.resolve(num_devices)
  message = _shards(settings, sizes)
  if message:
    raise ValueError(message)
  return sizes


def derived(settings: Settings) -> dict[str, int]:
  """Numbers that follow from the config, by what they count."""
  train, sft = settings.train, settings.sft
  episodes = train.prompts * train.samples
  groups = train.prompts // train.mini_batches
  return {
      'episodes per iteration': episodes,
      'groups per mini-batch': groups,
      'episodes per mini-batch': groups * train.samples,
      'updates per iteration': train.epochs * train.mini_batches,
      'updates in all': settings.total_updates,
      'episodes in all': train.iterations * episodes,
      'tasks in all': train.iterations * train.prompts,
      'waves of slots per iteration': math.ceil(
          episodes / settings.rollout.slots
      ),
      'cold-start updates': sft.exercise_steps + sft.steps,
      'tokens per micro-batch, at most': train.micro_batch
      * max(train.pack_len),
  }


def describe(settings: Settings) -> str:
  """The derived numbers as lines, to be printed at start-up."""
  return '\n'.join(
      f'  {name}: {value:,}' for name, value in derived(settings).items()
  )
