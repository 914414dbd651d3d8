"""Everything a run is made of, built once from its settings.

Leaves out the order in which things happen (`run.py`).  Invariant: nothing is
downloaded; whatever is not in the run folder comes from a path, an installed
package or a generator.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from agent_rl_jax.data import demonstrations
from agent_rl_jax.envs.registry import ENVS
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.mesh import make_mesh, make_rollout_mesh
from agent_rl_jax.parallel.rules import ROLLOUT_RULES, TRAIN_RULES, Partition
from agent_rl_jax.rewards.reward_set import RewardSet
from agent_rl_jax.rollout.decode import Programs, make_programs
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.text.chat import make_chat
from agent_rl_jax.text.sentencepiece_model import train_sentencepiece
from agent_rl_jax.text.stops import stop_table
from agent_rl_jax.text.tags import TAG_CONTROL
from agent_rl_jax.text.tokenizers import make_tokenizer
from agent_rl_jax.tools import make_tool
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.train.publish import make_publish
from agent_rl_jax.train.settings import Settings, check_devices
from agent_rl_jax.weights import load as weights_lib


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a run is made of.

  Attributes:
    settings: Options of every room.
    tokenizer, chat: Text to ids and back.
    model: Shape of the policy.
    params: Loaded parameters (numpy), or None to begin from random ones.
    train_part, rollout_part: Meshes and rules.
    programs: Compiled functions of the rollout.
    publish: Trainer parameters to rollout parameters.
    engine: Plays episodes in the configured environment.
    tools: The tools by name.
    judges: Threads that rewards run on.
    executors: All threads, to be closed.
    stop: Set to end the run at the next safe point.
  """

  settings: Settings
  tokenizer: Any
  chat: Any
  model: ModelConfig
  params: Any
  train_part: Partition
  rollout_part: Partition
  programs: Programs
  publish: Callable[[Any], Any]
  engine: Engine
  tools: Mapping[str, Any]
  judges: Executor
  executors: tuple[Executor, ...]
  stop: threading.Event

  def rewards(self) -> RewardSet:
    """Fresh rewards: one with memory belongs to one run."""
    options = self.settings.rewards
    return RewardSet(options.by_name(), options.metric)

  def engine_without_tools(self) -> Engine:
    """The same engine, in the same environment without any tool."""
    settings = self.settings
    env = ENVS[settings.env_name]({}, None, settings.env)
    return self.engine.with_envs({settings.env_name: env})

  def protection(self) -> str:
    """One line per sandbox: which protection confines model-written code."""
    lines = [
        f'{name}: {tool.sandbox.why}'
        for name, tool in self.tools.items()
        if hasattr(tool, 'sandbox')
    ]
    return '\n'.join(lines)

  def close(self) -> None:
    """Ends tools and threads; waits for none that hangs."""
    for tool in self.tools.values():
      if hasattr(tool, 'close'):
        tool.close()
    for executor in self.executors:
      executor.close()


def build_tokenizer(settings: Settings, run_dir: pathlib.Path) -> Any:
  """The configured tokenizer; a sentencepiece model is trained when none is

  given, and kept in the run folder.
  """
  options = settings.tokenizer
  tags = {'control': TAG_CONTROL} if settings.chat_kind == 'tags' else {}
  if options.kind == 'sentencepiece' and not options.path:
    path = run_dir / 'tokenizer.model'
    if not path.exists():
      corpus = demonstrations.corpus(
          settings.seed, options.corpus, settings.demonstrations
      )
      train_sentencepiece(
          corpus,
          path,
          vocab_size=options.vocab_size,
          control=TAG_CONTROL,
      )
    return make_tokenizer('sentencepiece', path, **tags)
  if options.kind == 'gguf' and not options.path:
    path = weights_lib.resolve(settings.weights.path)
    return make_tokenizer('gguf', path)
  if options.kind in ('bytes', 'sentencepiece'):
    return make_tokenizer(options.kind, options.path or None, **tags)
  return make_tokenizer(options.kind, options.path)


def build_model(settings: Settings, tokenizer: Any) -> tuple[ModelConfig, Any]:
  """(config, loaded numpy parameters or None)."""
  path = settings.weights.path
  if not path:
    return settings.model_config(tokenizer.vocab_size), None
  config = weights_lib.read_config(path, **settings.model_overrides())
  return weights_lib.load(path, config)


def build_partitions(settings: Settings) -> tuple[Partition, Partition]:
  """Training and rollout partitions; no mesh at all for one device.

  Raises:
    ValueError: when the mesh does not fit the devices, or there are several
      processes.
  """
  if jax.process_count() > 1:
    raise ValueError(
        f'{jax.process_count()} processes: this version trains in one process'
        ' (over all of its devices); start it on one host'
    )
  sizes = check_devices(settings, jax.device_count())
  if math.prod(sizes) == 1:
    return Partition(None, TRAIN_RULES), Partition(None, ROLLOUT_RULES)
  mesh = make_mesh(settings.mesh)
  rollout_mesh = make_rollout_mesh(mesh)
  return Partition(mesh, TRAIN_RULES), Partition(rollout_mesh, ROLLOUT_RULES)


def build(settings: Settings) -> Parts:
  """Builds a run's parts; compiles nothing yet.

  Raises:
    ValueError, FileNotFoundError: what a room refuses.
    SandboxUnavailable: when model-written code could not be confined here.
  """
  run_dir = pathlib.Path(settings.run_dir)
  run_dir.mkdir(parents=True, exist_ok=True)
  # The sandbox server forks: it is started before any device thread is.
  python = dataclasses.asdict(settings.python)
  tools = {
      name: make_tool(name, **(python if name == 'python' else {}))
      for name in settings.tools
  }
  stop = threading.Event()
  tokenizer = build_tokenizer(settings, run_dir)
  chat = make_chat(settings.chat_kind, tokenizer, **settings.chat)
  model, params = build_model(settings, tokenizer)
  train_part, rollout_part = build_partitions(settings)
  stops = stop_table(
      tokenizer, chat.stop_ids, chat.stop_strings, model.vocab_size
  )
  programs = make_programs(
      model, settings.rollout, stops, settings.seed, rollout_part
  )
  tool_threads = Executor(settings.tool_workers, 'tools')
  env_threads = Executor(settings.rollout.workers, 'envs')
  judges = Executor(4, 'rewards')
  env = ENVS[settings.env_name](tools, tool_threads, settings.env)
  engine = Engine(
      programs,
      settings.rollout,
      chat,
      {settings.env_name: env},
      env_threads,
      settings.seed,
      stop.is_set,
  )
  return Parts(
      settings=settings,
      tokenizer=tokenizer,
      chat=chat,
      model=model,
      params=params,
      train_part=train_part,
      rollout_part=rollout_part,
      programs=programs,
      publish=make_publish(model, train_part, rollout_part),
      engine=engine,
      tools=tools,
      judges=judges,
      executors=(tool_threads, env_threads, judges),
      stop=stop,
  )
