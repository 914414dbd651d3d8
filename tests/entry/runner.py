"""A tiny run with erratic tools, which can be told where to die or to hang.

python -m tests.entry.runner RUN_DIR [--die=PHASE:CALL:SECONDS]
  [--hang=MARKER] [--no_sft] [--collect]

Tools answer deterministically and sleep at random; one reward remembers.
With --die the process gets SIGKILL that many seconds after the given call of
the given phase has begun.  With --hang every tool call of the fourth training
iteration and later hangs for an hour, and the first of them makes the file
MARKER.  With --collect it resamples, replays and keeps a running baseline.
Used by the kill and interrupt tests.
"""

import argparse
import collections
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest

from agent_rl_jax.rewards.registry import REWARDS
from agent_rl_jax.rollout.engine import Engine
from agent_rl_jax.rollout.slots import Purpose
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

# Whole iterations before tools hang: no multiple of checkpoint.every.
HANG_AFTER = 3


class ErraticTool:
  """Answers with the number of characters, after a random while."""

  spec = TOOL

  def __init__(self, marker=None):
    self._marker = marker
    self.hangs = False

  def __call__(self, arguments, *, deadline):
    del deadline
    if self.hangs:
      self._marker.touch()
      time.sleep(3600)
    time.sleep(0.02 * random.random())
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


class Novelty:
  """Pays less the more often a task was seen: a reward with memory."""

  def __init__(self):
    self._seen = collections.Counter()

  def __call__(self, task, episodes, step):
    del step
    self._seen[task.uid] += 1
    share = 1 / self._seen[task.uid]
    return [share * (e.num_action_tokens % 5) / 5 for e in episodes]

  def state_dict(self):
    return dict(self._seen)

  def load_state_dict(self, state):
    self._seen = collections.Counter(state)


def parity(task, episodes, step):
  """Half of all episodes are right, whatever they say."""
  del task, step
  return [float(episode.num_action_tokens % 2) for episode in episodes]


REWARDS['novelty'] = Novelty
REWARDS['parity'] = lambda: parity


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
  config.data.size = 6  # tasks come back: the novelty reward wears off
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
  # A coefficient that moves, and a reference policy: carried over a resume.
  config.algorithm.kl = 'k3'
  config.algorithm.kl_coef = 0.01
  config.algorithm.kl_adaptive = True
  config.algorithm.kl_horizon = 200.0
  config.train.iterations = 6
  config.train.prompts = 4
  config.train.samples = 4
  config.train.epochs = 2
  config.train.mini_batches = 2
  config.train.pack_len = (96, 160)
  config.rewards.names = ('length_cost', 'answer', 'novelty')
  config.rewards.weights = (1.0, 1.0, 1.0)
  config.eval.every = 2
  config.eval.problems = 4
  config.eval.final_problems = 8
  config.checkpoint.every = 2
  config.report.trajectories_every = 3
  config.report.progress = False
  return config


def collecting(config):
  """Half of the groups are dropped, a fourth of the batch is replayed."""
  config.train.samples = 2
  config.rewards.metric = 'parity'
  config.filter.name = 'dynamic_sampling'
  config.filter.tries = 4
  config.replay.capacity = 6
  config.replay.share = 0.25
  config.algorithm.advantage = 'reinforce'
  config.algorithm.baseline = 'exponential'
  return config


def make_erratic(patch, tool=None):
  """Has runs use an erratic tool and the noisy chat, as `patch` sets it."""
  patch.setattr(
      parts, 'make_tool', lambda name, **options: tool or ErraticTool()
  )
  patch.setattr(
      parts,
      'make_chat',
      lambda kind, tokenizer, **options: NoisyChat(tokenizer, **options),
  )


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
      threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return inner(*args, **kwargs)

  setattr(owner, name, counted)


def hang_late(tool):
  """Makes `tool` hang in training rollouts after HANG_AFTER of them."""
  inner = Engine.rollout

  def rollout(self, *args, purpose, version=0, **kwargs):
    tool.hangs = purpose == Purpose.TRAIN and version >= HANG_AFTER
    return inner(self, *args, purpose=purpose, version=version, **kwargs)

  Engine.rollout = rollout


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('run_dir')
  parser.add_argument('--die', default='')
  parser.add_argument('--hang', type=pathlib.Path)
  parser.add_argument('--no_sft', action='store_true')
  parser.add_argument('--collect', action='store_true')
  options = parser.parse_args()
  if options.die:
    phase, call, seconds = options.die.split(':')
    die_at(phase, int(call), float(seconds))
  tool = ErraticTool(options.hang)
  if options.hang:
    hang_late(tool)
  make_erratic(pytest.MonkeyPatch(), tool)
  cold_start._EVERY = 2
  config = tiny(options.run_dir)
  # No deadline helps a run whose tools hang: it is interrupted or it waits.
  config.env.tool_timeout = 3000.0
  config.rollout.step_timeout = 6000.0
  if options.no_sft:
    config.sft.exercise_steps = config.sft.steps = 0
  if options.collect:
    config = collecting(config)
  run.run(config, settings.resolve(config, base.get_config()))


if __name__ == '__main__':
  main()
