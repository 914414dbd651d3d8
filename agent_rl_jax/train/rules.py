"""Rules across rooms: what no room alone can refuse.

Each rule takes the settings and returns the rule that is broken, worded for
the one who broke it, or None; a caution likewise, of what may be meant and is
only told.  Leaves out what one room's options check.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_rl_jax.algorithms.advantages import (
    NEEDS_GROUPS,
    NEEDS_VALUES,
)
from agent_rl_jax.algorithms.options import refuse_double_correction

if TYPE_CHECKING:
  from agent_rl_jax.train.settings import Settings


def _mini_batches(s: Settings) -> str | None:
  if s.train.prompts % s.train.mini_batches:
    return (
        f'train.prompts={s.train.prompts} is not a multiple of'
        f' train.mini_batches={s.train.mini_batches}: whole groups go into each'
        ' mini-batch'
    )


def _group_of_one(s: Settings) -> str | None:
  if s.algorithm.advantage in NEEDS_GROUPS and s.train.samples < 2:
    return (
        f'train.samples={s.train.samples} with'
        f' algorithm.advantage={s.algorithm.advantage!r}: a group of one has no'
        ' advantage; give at least 2'
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
  return shards(s, (s.mesh.data, s.mesh.fsdp, s.mesh.tensor))


def shards(s: Settings, sizes: tuple[int, int, int]) -> str | None:
  """What mesh sizes (data, fsdp, tensor) the batches and heads do not fit."""
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
  if algorithm.kl != 'none' and algorithm.kl_coef == 0:
    return (
        f'algorithm.kl={algorithm.kl!r} with algorithm.kl_coef=0 adds no KL but'
        ' still scores every batch with the reference policy: set kl_coef'
        " (0.001 to 0.05), or kl='none'"
    )


def _warmup(s: Settings) -> str | None:
  critic = s.critic.warmup_updates
  if s.total_updates and critic >= s.total_updates:
    return (
        f'critic.warmup_updates={critic} is not below the {s.total_updates}'
        ' updates of the run: the policy would never move'
    )
  for name, optimizer, updates in (
      ('optimizer', s.optimizer, s.total_updates - critic),
      ('critic.optimizer', s.critic_optimizer, s.total_updates),
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


def _code_tool(s: Settings) -> str | None:
  if s.chat.get('tool_dialect', 'code_block') != 'code_block' or not s.tools:
    return None
  if s.chat['code_tool'] not in s.tools:
    return (
        f'the chat format calls the tool {s.chat["code_tool"]!r}, which is not'
        f' in tools.names={s.tools}; add it or change code_tool'
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


def _threads(s: Settings) -> str | None:
  # A thread may hang until its deadline: with one for every slot, it keeps
  # no healthy episode waiting.
  for name, workers in (
      ('rollout.workers', s.rollout.workers),
      ('tools.workers', s.tool_workers),
  ):
    if workers < s.rollout.slots:
      return (
          f'{name}={workers} is below rollout.slots={s.rollout.slots}: hung'
          ' tools would take the threads of healthy episodes; raise it'
      )


def _sandbox_queue(s: Settings) -> str | None:
  if 'python' not in s.tools:
    return None
  waves = math.ceil(s.rollout.slots / s.python.processes)
  worst = waves * s.python.wall_seconds
  if worst > s.env.tool_timeout:
    return (
        f'{s.rollout.slots} episodes whose code runs to the end of'
        f' tools.python.wall_seconds={s.python.wall_seconds} keep'
        f' tools.python.processes={s.python.processes} busy for {worst:.0f} s,'
        f' longer than env.tool_timeout={s.env.tool_timeout}: an honest call'
        ' could go unanswered; raise processes or tool_timeout'
    )


def _filter(s: Settings) -> str | None:
  if s.filter.name == 'dynamic_sampling' and s.train.samples < 2:
    return (
        f"filter.name='dynamic_sampling' with train.samples={s.train.samples}: a"
        ' group of one never differs inside; give at least 2'
    )


def _episode_names(s: Settings) -> str | None:
  tries = s.filter.tries if s.filter.resamples else 1
  episodes = tries * s.train.iterations * s.train.prompts * s.train.samples
  if episodes > 2**32:
    return (
        f'{episodes:,} episodes in all, at most: their random streams are named'
        ' by 32 bits; lower train.iterations or filter.tries'
    )


def _overlong(s: Settings) -> str | None:
  if s.overlong.penalty == 0:
    return None
  most = s.rollout.max_episode_tokens
  limit = s.overlong.limit or most
  if s.overlong.buffer > limit:
    return f'overlong.buffer={s.overlong.buffer} is above the limit of {limit}'
  if limit - s.overlong.buffer >= most:
    return (
        f'overlong.limit={limit} with overlong.buffer={s.overlong.buffer}: no'
        f' episode of rollout.max_episode_tokens={most} reaches the buffer;'
        ' lower the limit or widen the buffer'
    )
  if s.algorithm.advantage == 'gdpo':
    return (
        "algorithm.advantage='gdpo' reads reward components and not the return,"
        ' so that it would not see overlong.penalty: use the reward length_cost'
    )


def _replay(s: Settings) -> str | None:
  if s.replay.capacity == 0:
    return None
  if s.replay.groups(s.train.prompts) < 1:
    return (
        f'replay.share={s.replay.share} of train.prompts={s.train.prompts} is'
        ' less than one group: nothing would be replayed; raise either'
    )
  if s.replay.admit == 'mixed' and s.train.samples < 2:
    return (
        f"replay.admit='mixed' with train.samples={s.train.samples}: a group of"
        " one never differs inside; use 'kept'"
    )


def _double_correction(s: Settings) -> str | None:
  try:
    refuse_double_correction(s.algorithm, s.train.old_logprobs)
  except ValueError as error:
    return str(error)
  return None


def _estimator(s: Settings) -> str | None:
  name = s.algorithm.advantage
  if name in NEEDS_VALUES and s.critic.kind == 'none':
    return (
        f'algorithm.advantage={name!r} needs values: set critic.kind to'
        " 'own' or 'shared', or choose an estimator without a critic"
    )
  if name not in NEEDS_VALUES and s.critic.kind != 'none':
    return (
        f'critic.kind={s.critic.kind!r} with algorithm.advantage={name!r},'
        " which reads no values: set critic.kind='none', or one of"
        f' {sorted(NEEDS_VALUES)}'
    )


def _components(s: Settings) -> str | None:
  weights = s.algorithm.component_weights
  if s.algorithm.advantage != 'gdpo':
    return None
  if len(weights) != len(s.rewards.names):
    return (
        f'algorithm.component_weights={weights} for rewards.names='
        f'{s.rewards.names}: give one weight to each, in that order, or () for'
        ' rewards.weights'
    )
  if not any(weights):
    return (
        f"algorithm.advantage='gdpo' weighs its components {weights}: with"
        ' nothing but zeros there is nothing to learn from'
    )


def _supervised(s: Settings) -> str | None:
  if s.algorithm.loss == 'sft' and s.train.iterations:
    return (
        "algorithm.loss='sft' reads no advantage, so that RL would ignore the"
        ' rewards: choose a policy loss; demonstrations are learned in the cold'
        ' start (sft.steps)'
    )


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
    _code_tool,
    _cold_start,
    _held_out,
    _threads,
    _sandbox_queue,
    _filter,
    _episode_names,
    _overlong,
    _replay,
    _double_correction,
    _estimator,
    _components,
    _supervised,
)


def _stale(s: Settings) -> str | None:
  # A filter leaves surplus only in a second wave.
  surplus = s.filter.resamples and s.filter.tries > 1
  if not (surplus or s.replay.capacity):
    return None
  algorithm = s.algorithm
  source = 'replay' if s.replay.capacity else f'filter {s.filter.name!r}'
  if s.train.old_logprobs == 'sampler' and algorithm.loss == 'reinforce':
    return (
        f"algorithm.loss='reinforce' with the {source}: it has no ratio, so"
        ' that rows which an older policy sampled are trained on as if they'
        " were this one's; use 'ppo_clip', or train.old_logprobs='recompute'"
        " with algorithm.correction='tis'"
    )
  if (
      s.train.old_logprobs == 'recompute'
      and algorithm.correction == algorithm.rejection == 'none'
  ):
    return (
        f"train.old_logprobs='recompute' with the {source}, and neither a"
        ' correction nor a rejection: rows that an older policy sampled are'
        " trained on as if they were this one's; set algorithm.correction"
        " ('tis'), or train.old_logprobs='sampler'"
    )


def _no_turn_rewards(s: Settings) -> str | None:
  if s.algorithm.advantage != 'mt_grpo':
    return None
  if not s.rewards.by_name().get('environment'):
    return (
        "algorithm.advantage='mt_grpo' is grpo without turn rewards in the"
        " return: give the reward 'environment' a weight (rewards.names,"
        ' rewards.weights)'
    )
  if s.env_name == 'tool' and s.env.call_reward == 0:
    return (
        "algorithm.advantage='mt_grpo' is grpo where no turn is rewarded: the"
        " environment 'tool' rewards none with env.call_reward=0"
    )


CAUTIONS: tuple[Callable[[Settings], str | None], ...] = (
    _stale,
    _no_turn_rewards,
)
