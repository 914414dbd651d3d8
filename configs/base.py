"""Every configuration key, once, with its meaning.

A study is a short file beside this one: it takes `get_config()`, changes some
keys and says in its docstring the command, the cost and the numbers to expect.
Keys are changed on the command line as ml_collections users know them:
`--config=configs/quickstart.py --config.train.lr=1e-4`.
"""

from ml_collections import config_dict

from agent_rl_jax.tools.sandbox import options as sandbox

ConfigDict = config_dict.ConfigDict
create = config_dict.create
unset = config_dict.placeholder  # None, until set to a value of the type


def optimizer() -> ConfigDict:
  """Keys of an optimizer; its rate stands beside it, in `train.lr`, ..."""
  return create(
      name='adamw',  # adamw | muon | sgd
      schedule='constant',  # constant | linear | cosine, after the warm-up
      warmup=0,  # updates of linear warm-up
      final=0.0,  # fraction of the rate left when the schedule ends
      b1=0.9,  # first-moment decay of Adam; momentum of sgd
      b2=0.999,  # second-moment decay of Adam
      eps=1e-8,  # added to Adam's denominator and to Muon's norm
      momentum=0.95,  # momentum of Muon
      weight_decay=0.0,  # decoupled, of matrices only
      max_grad_norm=1.0,  # global-norm clip of the gradient; 0 = none
  )


def data(split: str = 'train') -> ConfigDict:
  """Keys of a task source; a key that the kind does not read stays unset."""
  return create(
      kind='word_problems',  # word_problems | jsonl | tfds
      system='',  # system message in front of every task
      shuffle=True,  # anew in every epoch
      on_error='skip',  # skip | raise, for malformed records
      split=split,  # word_problems: train | heldout; tfds: split or slice
      size=100_000,  # word_problems: tasks of an epoch
      path='',  # jsonl: the file; tfds: folder of a prepared data set
      dataset='',  # tfds: registered name, instead of path
      data_dir='',  # tfds: root of the prepared data sets for `dataset`
      name='',  # of the data set; '' = taken from the file
      parser='gsm8k',  # see data/records.py
      question_field='question',
      answer_field='answer',
      extra_fields=(),  # more fields to copy into the payload, as text
      instruction='',  # appended to every question
  )


def get_config() -> ConfigDict:
  """Returns the defaults, locked: a key that is not here cannot be set."""
  config = ConfigDict()

  config.seed = 0  # names every random draw of the run
  config.run_dir = 'runs/default'  # all output; rerun with it to resume

  config.model = create(
      # The decoder; ignored but for dtype, param_dtype, remat and
      # head_megabytes when `weights.path` names a checkpoint.
      num_layers=2,
      width=128,  # of the residual stream
      num_heads=4,  # query heads
      num_kv_heads=4,  # key/value heads; divides num_heads
      head_dim=32,  # even
      mlp_width=384,
      rope_theta=10_000.0,  # base of the rotary frequencies
      norm_eps=1e-6,
      tied_head=True,  # output head is the embedding table
      qkv_bias=False,  # Qwen2.5
      qk_norm=True,  # Qwen3
      dtype='float32',  # of activations: float32 | bfloat16
      param_dtype='float32',  # of stored parameters
      remat=False,  # recompute blocks in the backward pass
      head_megabytes=64,  # size of one piece of logits in the loss
  )

  config.weights = create(
      # GGUF file, folder with config.json and safetensors, or package:NAME;
      # '' = random parameters of the shape above.
      path='',
  )

  config.tokenizer = create(
      kind='bytes',  # bytes | sentencepiece | bpe | gguf
      # Its file; '' trains sentencepiece into the run folder, and takes the
      # gguf tokenizer from `weights.path`.
      path='',
      vocab_size=400,  # pieces, when trained
      corpus=4000,  # texts to train on
  )

  config.chat = create(
      kind='tags',  # tags | template: which of the two below is used
      tags=create(
          code_tool='python',  # tool that is called with the code
          describe_tools=False,  # list the tools in the system message
          max_observation_tokens=512,  # longer texts lose their middle
      ),
      template=create(
          template='',  # Jinja source or its file; '' = the tokenizer's own
          variables=(),  # further variables of it, as (name, value) pairs
          tool_dialect='code_block',  # code_block | hermes
          code_tool='python',  # tool that code blocks call
          describe_tools=True,  # say in the prompt how to call the tools
          instructions=unset(str),  # that text; None: the dialect's own
          system='',  # system message of conversations that bring none
          stop_tokens=unset(tuple),  # marks that end a turn; None: known ones
          stop_strings=unset(tuple),  # None: the dialect's own
          max_observation_tokens=512,  # longer texts lose their middle
      ),
  )

  config.data = data()

  config.env = create(
      name='tool',
      max_tool_calls=4,  # of an episode; 0 allows none
      tool_timeout=40.0,  # seconds for the calls of one turn, queueing included
      max_output_chars=2048,  # of one result that the agent sees
      call_reward=0.0,  # turn reward of the first turn whose calls all succeed
      # Added to the last result when no call is left.
      call_limit_notice='No tool calls are left. Give your final answer.',
  )

  config.tools = create(
      names=('python',),  # python | calculator; () = text only
      workers=64,  # threads that run tool calls; one for every slot
      python=create(
          backend='auto',  # auto | process | monty
          wall_seconds=2.0,  # of a call
          cpu_seconds=2,  # whole seconds of computing
          memory_bytes=512 << 20,  # beyond the interpreter
          output_bytes=8192,  # printed bytes that are kept
          file_bytes=1 << 20,  # largest file in the scratch folder
          processes=4,  # calls that can run at the same time
          preload=sandbox.PRELOAD,  # modules imported once for all calls
          paths=(),  # further library folders to import from
          layers=sandbox.LAYERS,  # protection to use where it is there
      ),
  )

  config.rewards = create(
      # answer | format | execution | environment | call_cost | length_cost
      names=('answer',),
      weights=(1.0,),  # of each in the total; 0 records it only
      metric='answer',  # what accuracy means, whatever its weight
  )

  config.rollout = create(
      slots=64,  # rows that decode together
      max_len=256,  # tokens of a row: prompt, actions, observations
      chunk=16,  # tokens decoded per compiled call
      extend_rows=4,  # rows per data shard in one prefill call
      extend_block=64,  # new tokens per row in one prefill call
      forced_limit=32,  # longest observation that rides along in decoding
      max_turns=4,  # actions of an episode
      max_action_tokens=64,  # sampled tokens of one action
      max_episode_tokens=128,  # sampled tokens of an episode
      temperature=1.0,  # of training; divides logits in scoring too
      step_timeout=60.0,  # seconds that an environment step may take
      workers=64,  # threads that run environment steps; one for every slot
  )

  config.algorithm = create(
      # reinforce | reward_to_go | reinforce_plus_plus |
      # reinforce_plus_plus_baseline | rloo | remax | grpo | dr_grpo | gdpo |
      # opo | gpg | gae | bi_level_gae | turn_gae | turn_return | mt_grpo | gigpo
      advantage='grpo',
      normalize_std=False,  # divide by the standard deviation
      epsilon=1e-6,  # added to that standard deviation
      gamma=1.0,  # discount per token, or per turn of the turn estimators
      lam=1.0,  # GAE's lambda
      high_gamma=0.95,  # bi_level_gae: discount from turn to turn
      whiten=True,  # GAE: whiten advantages over the batch's tokens
      turn_rewards=True,  # credit the environment's to their turns
      turn_coef=1.0,  # mt_grpo: weight of the turn advantage
      step_coef=1.0,  # gigpo: weight of the step advantage
      # gigpo: how alike texts of one anchor state are, up to 1; 0 = equal keys
      similarity=0.0,
      pooled=False,  # gigpo: count an episode once per turn
      component_weights=(),  # gdpo: of each component; () = rewards.weights
      baseline='batch_mean',  # reinforce: batch_mean | all | exponential | window
      baseline_decay=0.9,  # of the exponential baseline
      baseline_window=10,  # batches of the window baseline
      # ppo_clip | gspo | cispo | gmpo | sapo | reinforce
      loss='ppo_clip',
      clip_low=unset(float),  # the ratio's lower bound is 1 - it; None: paper's
      clip_high=unset(float),  # its upper bound is 1 + it; None: paper's
      dual_clip=10.0,  # bound on a negative advantage's ratio; 0 = none
      sapo_positive=1.0,  # sapo: temperature of positive advantages
      sapo_negative=1.05,  # sapo: temperature of the others
      # A key of algorithms/aggregate.py; None: the paper's of the loss
      aggregation=unset(str),
      norm_length=0.0,  # tokens, of seq-mean-token-sum-norm
      opsm_delta=0.0,  # drop stale rows of negative advantage above it; 0 = off
      entropy_coef=0.0,  # of the entropy bonus
      value_clip=0.2,  # how far a value may move from the old one; 0 = any
      kl='none',  # none | k1 | k2 | k3, or with + for its gradient
      kl_coef=0.0,  # of the KL to the reference policy
      kl_placement='loss',  # loss | reward
      kl_importance=False,  # weigh the KL in the loss by the ratio
      kl_adaptive=False,  # move the coefficient towards kl_target
      kl_target=0.1,  # nats per token
      kl_horizon=10_000.0,  # episodes over which it adapts
      # Where sampler and trainer disagree: none | tis | tis_sequence |
      # tis_geometric | icepop | icepop_sequence | icepop_geometric
      correction='none',
      correction_low=unset(float),  # of the weight; None: the method's own
      correction_high=unset(float),  # of the weight; None: the method's own
      correction_normalize=False,  # divide the weights by their mean
      rejection='none',  # a key of algorithms/choices.REJECTION_BOUNDS
      rejection_low=unset(float),  # None: the method's own
      rejection_high=unset(float),  # None: the method's own
      rejection_denominator='kept',  # kept | original
  )

  config.filter = create(
      # Which groups are trained on: none | dynamic_sampling | accuracy_band |
      # top_share | top_count | min_p | top_p | top_p_softmax.  The first two
      # filters play new tasks until the batch is full; the others rank.
      name='none',
      value=0.9,  # share, number or bound, of the filters that rank
      measure='std',  # std | mean | sum of a group's raw rewards ranks it
      smallest=False,  # keep the smallest scores instead
      zeros=True,  # False drops groups of score 0 first
      tries=10,  # waves of tasks that resampling may play for a batch
      band_low=0.2,  # accuracy_band: least mean metric of a group
      band_high=0.8,  # accuracy_band: greatest mean metric of a group
  )

  config.overlong = create(
      penalty=0.0,  # off the return at the limit or if truncated; 0 = none
      buffer=32,  # sampled tokens before the limit over which it grows
      limit=0,  # sampled tokens; 0 = rollout.max_episode_tokens
      mask=False,  # truncated episodes: no part of the loss
  )

  config.replay = create(
      capacity=0,  # groups kept from earlier batches; 0 = no replay
      share=0.5,  # of the batch's groups that may be replayed, below 1
      max_age=4,  # iterations since a group was sampled, at most
      admit='kept',  # kept | mixed: of those, groups whose metric differs
  )

  config.optimizer = optimizer()

  config.critic = create(
      # none | own: a trunk of its own, begun as the policy's | shared: a head
      # on the policy's trunk.  For the gae estimators.
      kind='none',
      lr=1e-3,  # peak learning rate of the critic
      warmup_updates=0,  # first updates, in which the critic alone moves
      value_coef=1.0,  # of the value loss beside the policy's
      stop_gradient=False,  # shared: the value loss trains the head alone
      optimizer=optimizer(),
  )

  config.train = create(
      iterations=50,  # rollout batches; 0 skips RL
      prompts=16,  # tasks of a rollout batch
      samples=8,  # episodes of each task: its group
      epochs=1,  # passes over a rollout batch
      mini_batches=1,  # updates of one pass, whole groups in each
      micro_batch=8,  # rows of one forward and backward pass
      pack_len=(256,),  # tokens of such a row; every length is compiled
      lr=3e-4,  # peak learning rate of RL
      old_logprobs='recompute',  # recompute | sampler
  )

  config.sft = create(
      exercise_steps=0,  # updates on short exercises, first
      steps=0,  # updates on demonstrations; 0 and 0 = no cold start
      batch=64,  # demonstrations of one update
      micro_batch=8,  # rows of one forward and backward pass
      pack_len=(256,),  # tokens of such a row; every length is compiled
      lr=3e-3,  # peak learning rate of the cold start
      warn_below=0.15,  # warn when the sampled reward before RL is lower
      optimizer=optimizer(),
      demonstrations=create(
          # Shares of (right, wrong, guess); story k follows mix k modulo 3.
          mixes=(
              (0.60, 0.15, 0.25),
              (0.25, 0.50, 0.25),
              (0.25, 0.15, 0.60),
          ),
          # Shares of (list, one_step, head) among the short exercises.
          exercises=(0.2, 0.5, 0.3),
      ),
  )

  config.eval = create(
      every=10,  # iterations between evaluations; 0 = at the end only
      problems=64,  # held-out problems of an evaluation during training
      final_problems=256,  # of the comparison at the end
      samples=1,  # episodes of each problem
      temperature=0.0,  # 0 = greedy
      without_tool=False,  # also train the cold start without any tool
      data=data('heldout'),
  )

  config.checkpoint = create(
      every=10,  # iterations between checkpoints
      keep=2,  # checkpoints kept
  )

  config.watch = create(
      # Signs of collapse are told whatever `stop` says; RAGEN-2's rule.
      stop=False,  # end RL when the stop rule is met
      base_steps=10,  # first steps whose mean is a metric's base
      warn_steps=3,  # consecutive steps that a sign must last
      spread_fraction=0.2,  # of its base: in-group reward std below it
      entropy_fraction=0.05,  # of its base: entropy below it
      repetition_rise=0.2,  # repetition above its base by more
      dependence_fraction=0.5,  # of its base: input dependence below it
      spike_factor=10.0,  # gradient norm above so many times the median
      spike_window=20,  # earlier steps of that median
      solved=0.9,  # accuracy from which narrowing is success
      stop_fraction=0.1,  # stop: in-group reward std below this of its base
      stop_steps=10,  # for so many consecutive steps,
      stop_empty=5,  # or so many steps whose filter kept no group,
      stop_validations=5,  # or so many validations
      stop_success=0.01,  # with an accuracy below this
  )

  config.mesh = create(
      # At most one of them may be -1: all devices that are left.
      data=1,
      fsdp=1,
      tensor=1,
  )

  config.report = create(
      jsonl=True,  # metrics.jsonl
      tensorboard=True,  # event files
      trajectories_every=10,  # iterations between samples; 0 = none
      trajectories=16,  # episodes of a sample, at most
      html=True,  # also write the sample as a page
      curves=True,  # curves.png
      progress=True,  # progress bar
      log_every=1,  # iterations between lines where there is no terminal
  )

  config.lock()
  return config
