"""Learns to use a Python sandbox on word problems, from nothing, on a laptop.

  python -m experiments.train --config=configs/quickstart.py

A policy of half a million parameters is trained on demonstrations of mixed
quality (a third of the story templates is mostly shown rightly, a third with
a wrong expression, a third by guessing), then by GRPO with the tool, and the
same cold start by GRPO without it.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.run_dir = 'runs/quickstart'

  config.tokenizer.kind = 'sentencepiece'
  config.tokenizer.vocab_size = 512

  config.model.num_layers = 2
  config.model.width = 128
  config.model.qk_norm = True

  config.sft.exercise_steps = 120
  config.sft.steps = 100
  config.sft.batch = 64
  config.sft.micro_batch = 16
  config.sft.pack_len = (128,)
  config.sft.lr = 0.02
  config.sft.optimizer.name = 'muon'
  # Without the decay, which behaviour is greedy still changes at the end.
  config.sft.optimizer.schedule = 'linear'
  config.sft.optimizer.final = 0.05

  config.env.max_tool_calls = 2
  config.rollout.slots = 48
  config.rollout.max_len = 128
  config.rollout.max_turns = 3
  config.rollout.max_action_tokens = 64
  config.rollout.max_episode_tokens = 128
  config.rollout.chunk = 6

  config.train.iterations = 36
  config.train.prompts = 16
  config.train.samples = 8
  config.train.micro_batch = 16
  config.train.pack_len = (128,)
  config.train.lr = 3e-4
  config.train.old_logprobs = 'sampler'
  config.optimizer.eps = 1e-5
  config.optimizer.schedule = 'linear'
  config.optimizer.final = 0.1

  config.eval.every = 10
  config.eval.problems = 64
  config.eval.final_problems = 256
  config.eval.without_tool = True
  config.checkpoint.every = 10
  return config
