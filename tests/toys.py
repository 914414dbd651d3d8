"""Small stand-ins shared by tests: a policy, a chat of ids, a scripted env."""

import dataclasses
import functools
import time

import jax
import numpy as np

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.mesh import MeshOptions, make_mesh, make_rollout_mesh
from agent_rl_jax.parallel.rules import ROLLOUT_RULES, Partition
from agent_rl_jax.rollout.decode import make_programs
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.types import Action, Observation, Task, ToolCall, ToolResult

VOCAB = 48
STOPS = tuple(range(1, 12))

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=48,
    qk_norm=True,
    tied_head=False,
)

OPTIONS = RolloutOptions(
    slots=4,
    max_len=64,
    chunk=5,
    extend_rows=2,
    extend_block=8,
    forced_limit=4,
    max_turns=3,
    max_action_tokens=12,
    max_episode_tokens=30,
    step_timeout=20.0,
)


def params(config=CONFIG, seed=0):
  """A random policy whose logits are far from flat."""
  tree = policy.init(config, jax.random.key(seed))
  tree['head']['table'] = tree['head']['table'] * 2
  return tree


def stops(vocab=VOCAB):
  table = np.zeros((2, vocab), np.int16)
  table[:, list(STOPS)] = 1
  table[1] = 1
  return table


class IdChat:
  """Messages hold ids; an action answers when its sum allows."""

  stop_ids = STOPS
  stop_strings = ()

  def prompt(self, messages, tools):
    return np.asarray(messages[0]['content'], np.int32)

  def observation(self, observation, last=None):
    return np.asarray(observation.messages[0]['content'], np.int32)

  def action(self, ids, finish):
    del finish
    total = int(np.sum(ids))
    if total % 3 == 0:
      return Action(text=str(total), answer=str(total))
    call = ToolCall('0', 'toy', {'total': total})
    return Action(text=str(total), tool_calls=(call,))


@dataclasses.dataclass
class ToyEnv:
  """Answers a call with ids made from its sum, after a delay.

  `misbehave` maps a task uid to 'raise' or 'hang'.
  """

  delay: float = 0.0
  seed: int = 0
  misbehave: dict = dataclasses.field(default_factory=dict)
  name: str = 'toy'
  tools: tuple = ()
  closed: list = dataclasses.field(default_factory=list)

  def __post_init__(self):
    self._rng = np.random.default_rng(self.seed)

  def reset(self, task, seed):
    return (task, seed, 0), Observation(messages=task.messages)

  def step(self, state, action):
    task, seed, turn = state
    if self.delay:
      time.sleep(self.delay * self._rng.random())
    what = self.misbehave.get(task.uid)
    if what == 'raise':
      raise RuntimeError('broken env')
    if what == 'hang':
      time.sleep(3600)
    if action.answer is not None:
      return (task, seed, turn + 1), Observation(done=True, reward=1.0)
    total = action.tool_calls[0].arguments['total']
    # Short and long ones: they take different ways into the cache.
    count = 1 + (total + seed) % 13
    ids = [6 + (total * 7 + seed + i) % (VOCAB - 6) for i in range(count)]
    message = {'role': 'tool', 'content': ids}
    return (task, seed, turn + 1), Observation(
        messages=(message,),
        tool_results=(ToolResult('0', str(total), True),),
    )

  def close(self, state):
    self.closed.append(state[0].uid)


def tasks(count=5, seed=0):
  rng = np.random.default_rng(seed)
  return [
      Task(
          uid=f'task{i}',
          env='toy',
          messages=(
              {
                  'role': 'user',
                  'content': rng.integers(
                      6, VOCAB, 1 + (7 * i + 3) % 22
                  ).tolist(),
              },
          ),
          payload={'answer': str(i)},
      )
      for i in range(count)
  ]


def requests(count=5, samples=3, first=0):
  return [
      Request(task, first + g * samples + i, g)
      for g, task in enumerate(tasks(count))
      for i in range(samples)
  ]


def partition(data=None, tensor=1):
  if data is None:
    return Partition(None, ROLLOUT_RULES)
  mesh = make_mesh(MeshOptions(data=data, fsdp=1, tensor=tensor))
  return Partition(make_rollout_mesh(mesh), ROLLOUT_RULES)


@functools.lru_cache
def _programs(config, options, part):
  """Compiled once for all tests of one shape: compiling is what takes time."""
  return make_programs(config, options, stops(config.vocab_size), 0, part)


def engine(options=OPTIONS, env=None, part=None, config=CONFIG, workers=8):
  """(engine, rollout params) of the random policy."""
  part = part or partition()
  programs = _programs(config, options, part)
  tree = policy.unstack(params(config))
  if part.mesh is not None:
    tree = jax.device_put(tree, part.tree(policy.unstacked_axes(config)))
  made = Engine(
      programs,
      options,
      IdChat(),
      {'toy': env or ToyEnv()},
      Executor(workers, 'toy'),
      seed=0,
  )
  return made, tree


def fingerprint(episodes, with_logprobs=True):
  """What must not change, by episode name."""
  out = {}
  for episode in episodes:
    row = episode.rows[0]
    parts = [
        row.tokens.tobytes(),
        row.action_mask.tobytes(),
        episode.status,
        tuple((t.action_start, t.action_stop) for t in episode.turns),
    ]
    if with_logprobs:
      parts.append(row.logprobs.tobytes())
    out[episode.uid] = tuple(parts)
  return out
