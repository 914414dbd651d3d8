"""Every configuration key, once, with its meaning.

A study is a short file beside this one: it takes `get_config()`, changes some
keys and says in its docstring the command, the cost and the numbers to expect.
Keys are changed on the command line as ml_collections users know them:
`--config=configs/quickstart.py --config.train.lr=1e-4`.
"""

from ml_collections import config_dict

ConfigDict = config_dict.ConfigDict


def optimizer() -> ConfigDict:
  """Keys of an optimizer; its rate stands in `train.lr` or `sft.lr`."""
  return ConfigDict(
      {
          'name': 'adamw',  # adamw | muon | sgd
          'schedule': 'constant',  # constant | linear | cosine, after the warm-up
          'warmup': 0,  # updates of linear warm-up
          'final': 0.0,  # fraction of the rate left when the schedule ends
          'b1': 0.9,  # first-moment decay of Adam; momentum of sgd
          'b2': 0.999,  # second-moment decay of Adam
          'eps': 1e-8,  # added to Adam's denominator and to Muon's norm
          'momentum': 0.95,  # momentum of Muon
          'weight_decay': 0.0,  # decoupled, of matrices only
          'max_grad_norm': 1.0,  # global-norm clip of the gradient; 0 = none
      }
  )


def get_config() -> ConfigDict:
  """Returns the defaults, locked: a key that is not here cannot be set."""
  config = ConfigDict()

  config.seed = 0  # names every random draw of the run
  config.run_dir = 'runs/default'  # all output; rerun with it to resume

  config.model = ConfigDict(
      {
          # The decoder; ignored but for dtype, param_dtype, remat and
          # head_megabytes when `weights.path` names a checkpoint.
          'num_layers': 2,
          'width': 128,  # of the residual stream
          'num_heads': 4,  # query heads
          'num_kv_heads': 4,  # key/value heads; divides num_heads
          'head_dim': 32,  # even
          'mlp_width': 384,
          'rope_theta': 10_000.0,  # base of the rotary frequencies
          'norm_eps': 1e-6,
          'tied_head': True,  # output head is the embedding table
          'qkv_bias': False,  # Qwen2.5
          'qk_norm': True,  # Qwen3
          'dtype': 'float32',  # of activations: float32 | bfloat16
          'param_dtype': 'float32',  # of stored parameters
          'remat': False,  # recompute blocks in the backward pass
          'head_megabytes': 64,  # size of one piece of logits in the loss
      }
  )

  config.weights = ConfigDict(
      {
          'path': '',  # GGUF file, safetensors file or folder; '' = from scratch
      }
  )

  config.tokenizer = ConfigDict(
      {
          'kind': 'bytes',  # bytes | sentencepiece | bpe | gguf
          'path': '',  # model file; '' trains sentencepiece into the run folder
          'vocab_size': 400,  # pieces, when trained
      }
  )

  config.chat = ConfigDict(
      {
          'kind': 'tags',  # tags | template
      }
  )

  config.data = ConfigDict({})

  config.env = ConfigDict({})

  config.tools = ConfigDict({})

  config.rollout = ConfigDict(
      {
          'slots': 64,  # episodes decoded side by side
          'max_len': 256,  # tokens of a row, prompt included
          'chunk': 16,  # tokens decoded between two reads of the report
          'extend_rows': 8,  # rows of one prefill call
          'extend_block': 64,  # new tokens of one prefill call and row
          'forced_limit': 16,  # longest observation fed as forced tokens
          'max_turns': 4,  # actions of an episode
          'max_action_tokens': 64,  # tokens of one action
          'temperature': 1.0,  # of training; divides logits in scoring too
          'step_timeout': 10.0,  # seconds that env.step may take
      }
  )

  config.algorithm = ConfigDict({})

  config.optimizer = optimizer()

  config.train = ConfigDict(
      {
          'iterations': 50,  # rollout batches; 0 skips RL
          'prompts': 16,  # tasks of a rollout batch
          'samples': 8,  # episodes of each task: its group
          'epochs': 1,  # passes over a rollout batch
          'mini_batches': 1,  # updates of one pass, whole groups in each
          'micro_batch': 8,  # rows of one forward and backward pass
          'pack_len': 256,  # tokens of such a row
          'lr': 3e-4,  # peak learning rate of RL
          'old_logprobs': 'recompute',  # recompute | sampler
      }
  )

  config.sft = ConfigDict(
      {
          'exercise_steps': 0,  # updates on short exercises, first
          'steps': 0,  # updates on demonstrations; 0 and 0 = no cold start
          'batch': 64,  # demonstrations of one update
          'micro_batch': 8,  # rows of one forward and backward pass
          'pack_len': 256,  # tokens of such a row
          'lr': 3e-3,  # peak learning rate of the cold start
          'warn_below': 0.15,  # warn when the sampled reward before RL is lower
          'optimizer': optimizer(),
      }
  )

  config.eval = ConfigDict(
      {
          'every': 10,  # iterations between evaluations; 0 = at the end only
          'problems': 64,  # held-out problems of an evaluation during training
          'final_problems': 256,  # of the comparison at the end
          'samples': 1,  # episodes of each problem
          'temperature': 0.0,  # 0 = greedy
          'without_tool': False,  # also train the cold start without any tool
      }
  )

  config.checkpoint = ConfigDict(
      {
          'every': 10,  # iterations between checkpoints
          'keep': 2,  # checkpoints kept
      }
  )

  config.mesh = ConfigDict(
      {
          # At most one of them may be -1: all devices that are left.
          'data': 1,
          'fsdp': 1,
          'tensor': 1,
      }
  )

  config.report = ConfigDict(
      {
          'jsonl': True,  # metrics.jsonl
          'tensorboard': True,  # event files
          'trajectories_every': 10,  # iterations between samples; 0 = none
          'trajectories': 16,  # episodes of a sample, at most
          'html': True,  # also write the sample as a page
          'curves': True,  # curves.png
          'progress': True,  # progress bar
          'log_every': 1,  # iterations between lines where there is no terminal
      }
  )

  config.lock()
  return config
