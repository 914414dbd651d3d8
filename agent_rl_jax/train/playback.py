"""A checkpoint brought back to life: to be scored, or to be played with.

Leaves out training; nothing here changes a run but its `evaluations` folder.
Invariant: the policy, tokenizer, environment and limits are those of the run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from agent_rl_jax.data.tasks import make_stream
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.slots import Purpose
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import settings as settings_lib
from agent_rl_jax.train.checkpoint import Checkpoints
from agent_rl_jax.train.cold_start import ColdStart
from agent_rl_jax.train.evaluate import evaluate
from agent_rl_jax.train.loop import Trainer
from agent_rl_jax.train.parts import Parts, build
from agent_rl_jax.train.report.html import write_trajectories
from agent_rl_jax.train.report.trajectories import make_record, token_texts
from agent_rl_jax.train.stage import write_json
from agent_rl_jax.types import Episode, Task


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A run's policy at one checkpoint, ready to play.

  Attributes:
    parts: What the run is made of.
    params: Rollout parameters.
    engine: In the environment of the stage.
    stage: Its name.
    step: The checkpoint's.
  """

  parts: Parts
  params: Any
  engine: Engine
  stage: str
  step: int

  def __enter__(self) -> Loaded:
    return self

  def __exit__(self, *_) -> None:
    self.parts.close()


def load(
    run_dir: str, base: Mapping[str, Any], stage: str, step: int | None = None
) -> Loaded:
  """Restores a stage of a run.

  Raises:
    FileNotFoundError: no such run, stage or step; says which there are.
  """
  folder = pathlib.Path(run_dir)
  if not (folder / 'config.json').exists():
    raise FileNotFoundError(
        f'{folder} is no run folder: it has no config.json; give the run_dir of'
        ' a run of experiments.train'
    )
  saved = folder / stage / 'checkpoints'
  if not saved.is_dir():
    there = sorted(p.parent.name for p in folder.glob('*/checkpoints'))
    raise FileNotFoundError(f'{folder} has no stage {stage!r}; it has {there}')
  config = config_lib.load(folder / 'config.json', base)
  settings = dataclasses.replace(
      settings_lib.resolve(config, base), run_dir=str(folder)
  )
  checkpoints = Checkpoints(saved, read_only=True)
  step = checkpoints.latest() if step is None else step
  if step is None:
    raise FileNotFoundError(f'{saved} holds no whole checkpoint yet')
  parts = build(settings)
  trainer = (
      ColdStart(parts, config) if stage == 'cold_start' else Trainer(parts)
  )
  state, _ = checkpoints.restore(trainer.abstract(), step)
  checkpoints.close()
  if isinstance(state, tuple):
    state = state[0]
  engine = parts.engine
  if stage == 'without_tool':
    engine = parts.engine_without_tools()
  params = parts.publish(state.trainable['policy'])
  return Loaded(parts, params, engine, stage, step)


def score_checkpoint(
    loaded: Loaded,
    problems: int | None = None,
    samples: int = 1,
    temperature: float = 0.0,
) -> dict[str, float]:
  """Scores it on held-out problems; prints and writes the figures."""
  parts, settings = loaded.parts, loaded.parts.settings
  stream = make_stream(settings.eval_data, seed=settings.seed)
  wanted = problems or settings.eval.final_problems
  tasks = stream.take(min(wanted, len(stream.source)))
  scored, stats = evaluate(
      loaded.engine,
      loaded.params,
      tasks,
      parts.rewards(),
      parts.judges,
      samples=samples,
      temperature=temperature,
      version=loaded.step,
  )
  metrics = scored.metrics() | stats.metrics(settings.rollout.slots)
  name = f'{loaded.stage}_{loaded.step:06d}'
  folder = pathlib.Path(settings.run_dir) / 'evaluations'
  write_json(folder / f'{name}.json', metrics)
  records = [
      make_record(episode, parts.tokenizer, total=float(scored.returns[i]))
      for i, episode in enumerate(
          scored.episodes[: settings.report.trajectories]
      )
  ]
  write_trajectories(folder / f'{name}.html', records, name)
  print(f'{loaded.stage}, step {loaded.step}: {len(tasks)} problems')
  for key in sorted(metrics):
    if key.startswith(('episode/', 'reward/', 'tools/', 'failures/')):
      print(f'  {key:<28} {metrics[key]:.4f}')
  print(f'figures and episodes: {folder / name}.json, .html')
  return metrics


def play(
    loaded: Loaded,
    temperature: float = 0.0,
    read: Callable[[str], str] = input,
    out: TextIO | None = None,
) -> None:
  """Plays typed problems until the input ends; `out` is stdout by default."""
  out = out or sys.stdout
  settings = loaded.parts.settings
  stream = make_stream(settings.eval_data, seed=settings.seed)
  print('Type a problem; an empty line takes a held-out one.', file=out)
  number = 0
  while True:
    try:
      text = read('\n> ')
    except (EOFError, KeyboardInterrupt):
      print(file=out)
      return
    if text.strip():
      messages = ({'role': 'user', 'content': text.strip()},)
      task = Task(f'typed/{number}', settings.env_name, messages)
    else:
      task = stream.take(1)[0]
      print(task.messages[-1]['content'], file=out)
    episodes, _ = loaded.engine.rollout(
        loaded.params,
        [Request(task, number, 0)],
        purpose=Purpose.PLAY,
        version=loaded.step,
        temperature=temperature,
    )
    number += 1
    print(transcript(episodes[0], loaded.parts.tokenizer), file=out)
    if 'answer' in task.payload:
      print(f'(right: {task.payload["answer"]})', file=out)


def transcript(episode: Episode, tokenizer: Any) -> str:
  """The turns of an episode, who wrote what before each line."""
  row = episode.rows[0]
  texts = token_texts(row.tokens, tokenizer)
  join = lambda start, stop: ''.join(texts[start:stop])
  lines = []
  for turn in episode.turns:
    lines.append(f'agent: {join(turn.action_start, turn.action_stop)}')
    seen = join(turn.action_stop, turn.observation_stop)
    if seen:
      lines.append(f'world: {seen}')
  detail = f' ({episode.detail})' if episode.detail else ''
  lines.append(
      f'[{episode.status.value}{detail}; answer: {episode.answer};'
      f' {episode.num_action_tokens} tokens]'
  )
  return '\n'.join(lines)
