"""A tiny run with erratic tools, which can be told where to die.

python -m tests.entry.runner RUN_DIR [PHASE:CALL:SECONDS]

Tools answer deterministically and sleep at random.  With a second argument
the process gets SIGKILL that many seconds after the given call of the given
phase has begun.  Used by the kill and interrupt tests.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

from agent_rl_jax import tools
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.text.tag_chat import TagChat
from agent_rl_jax.tools.tool import ok_result
from agent_rl_jax.train import (
    arm,
    checkpoint,
    cold_start,
    parts,
    run,
    settings,
    update,
)
from agent_rl_jax.types import Action, ToolCall
from configs import base

TOOL = {
    'name': 'python',
    'description': 'Counts characters.',
    'parameters': {
        'type': 'object',
        'properties': {'code': {'type': 'string'}},
        'required': ['code'],
    },
}


class ErraticTool:
  """Answers with the number of characters, after a random while."""

  spec = TOOL

  def __init__(self, hang=False):
    self._hang = hang

  def __call__(self, arguments, *, deadline):
    del deadline
    time.sleep(3600 if self._hang else 0.02 * random.random())
    return ok_result(str(len(arguments['code'])))


class NoisyChat(TagChat):
  """Tags, but a tenth of all tokens end a turn: random policies call tools."""

  @property
  def stop_ids(self):
    return tuple(range(280, 330))

  @stop_ids.setter
  def stop_ids(self, value):
    del value

  def action(self, ids, finish):
    text = self.tokenizer.decode(ids)
    total = int(np.sum(ids))
    if total % 3 == 0:
      return Action(text=text, answer=str(total % 7))
    call = ToolCall('0', 'python', {'code': text})
    return Action(text=text, tool_calls=(call,))


def tiny(run_dir):
  config = base.get_config()
  config.run_dir = str(run_dir)
  config.tokenizer.kind = 'sentencepiece'
  config.tokenizer.corpus = 150
  config.model.width = 32
  config.model.num_layers = 1
  config.model.num_heads = config.model.num_kv_heads = 2
  config.model.head_dim = 8
  config.model.mlp_width = 32
  config.sft.exercise_steps = 2
  config.sft.steps = 3
  config.sft.batch = 8
  config.sft.pack_len = (128, 256)
  config.rollout.slots = 8
  config.rollout.max_len = 160
  config.rollout.chunk = 8
  config.rollout.max_action_tokens = 16
  config.rollout.max_episode_tokens = 48
  config.rollout.max_turns = 3
  config.train.iterations = 6
  config.train.prompts = 4
  config.train.samples = 4
  config.train.epochs = 2
  config.train.mini_batches = 2
  config.train.pack_len = (96, 160)
  config.rewards.names = ('length_cost', 'answer')
  config.rewards.weights = (1.0, 1.0)
  config.eval.every = 2
  config.eval.problems = 4
  config.eval.final_problems = 8
  config.checkpoint.every = 2
  config.report.trajectories_every = 3
  config.report.progress = False
  return config


def die_at(phase, call, seconds):
  """Arranges for SIGKILL after `call` calls of what `phase` means."""
  owner, name = {
      'cold_start': (cold_start.ColdStart, 'batch'),
      'rollout': (Engine, 'rollout'),
      'update': (update.Update, 'run'),
      'save': (checkpoint.Checkpoints, 'save'),
      'evaluate': (arm, 'evaluate'),
  }[phase]
  inner = getattr(owner, name)
  left = [call]

  def counted(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
      if seconds == 0:
        os.kill(os.getpid(), signal.SIGKILL)
      threading.Timer(
          seconds, os.kill, (os.getpid(), signal.SIGKILL)
      ).start()
    return inner(*args, **kwargs)

  setattr(owner, name, counted)


def main(run_dir, die='', hang=''):
  if die:
    phase, call, seconds = die.split(':')
    die_at(phase, int(call), float(seconds))
  tools.TOOLS = {**tools.TOOLS, 'python': lambda **_: ErraticTool(bool(hang))}
  parts.make_chat = lambda kind, tokenizer, **options: NoisyChat(
      tokenizer, **options
  )
  cold_start._EVERY = 2
  config = tiny(run_dir)
  if hang:
    config.env.tool_timeout = 3000.0
    config.rollout.step_timeout = 6000.0
  run.run(config, settings.resolve(config, base.get_config()))


if __name__ == '__main__':
  main(*sys.argv[1:])
