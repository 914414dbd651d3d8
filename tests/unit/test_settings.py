"""From config to settings: every key is read, every rule can be broken."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from agent_rl_jax.algorithms import advantages, choices, filters
from agent_rl_jax.algorithms.filters import FilterOptions
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.data.demonstrations import DemonstrationOptions
from agent_rl_jax.data.tasks import DataOptions
from agent_rl_jax.envs.tool_env import ToolEnvOptions
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.mesh import MeshOptions
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.text.tag_chat import TagOptions
from agent_rl_jax.text.template_chat import TemplateOptions
from agent_rl_jax.tools.sandbox.options import SandboxOptions
from agent_rl_jax.train import options, settings
from agent_rl_jax.train.optimizer import OptimizerOptions
from agent_rl_jax.train.watch import WatchOptions
from configs import base

# Section -> who reads it, and what it gets from elsewhere.
READERS = {
    'model': (ModelConfig, {'vocab_size'}),
    'weights': (options.WeightsOptions, set()),
    'tokenizer': (options.TokenizerOptions, set()),
    'chat.tags': (TagOptions, set()),
    'chat.template': (TemplateOptions, set()),
    'data': (DataOptions, {'env'}),
    'eval.data': (DataOptions, {'env'}),
    'env': (ToolEnvOptions, set()),
    'tools.python': (SandboxOptions, set()),
    'rewards': (options.RewardOptions, set()),
    'rollout': (RolloutOptions, set()),
    'algorithm': (AlgorithmOptions, set()),
    'filter': (FilterOptions, set()),
    'overlong': (options.OverlongOptions, set()),
    'replay': (options.ReplayOptions, set()),
    'optimizer': (OptimizerOptions, {'lr', 'total'}),
    'sft.optimizer': (OptimizerOptions, {'lr', 'total'}),
    'critic': (options.CriticOptions, set()),
    'critic.optimizer': (OptimizerOptions, {'lr', 'total'}),
    'train': (options.TrainOptions, set()),
    'sft': (options.SftOptions, set()),
    'sft.demonstrations': (DemonstrationOptions, set()),
    'eval': (options.EvalOptions, set()),
    'watch': (WatchOptions, set()),
    'checkpoint': (options.CheckpointOptions, set()),
    'mesh': (MeshOptions, set()),
    'report': (options.ReportOptions, set()),
}


CRITIC = {'algorithm__advantage': 'gae', 'critic__kind': 'own'}


def _resolve(**changes):
  """Settings of the base with 'section__key' changed."""
  config = base.get_config()
  for key, value in changes.items():
    *parents, last = key.split('__')
    node = config
    for parent in parents:
      node = node[parent]
    with node.ignore_type():
      node[last] = value
  return settings.resolve(config, base.get_config())


@pytest.mark.parametrize('name', sorted(READERS))
def test_base_lists_every_option_of_every_room(name):
  reader, provided = READERS[name]
  config = base.get_config()
  for part in name.split('.'):
    config = config[part]
  fields = {field.name for field in dataclasses.fields(reader)}
  assert fields - provided <= set(config)


def test_every_key_of_the_base_is_commented():
  """Each leaf has a comment on its line, above it, or a telling name."""
  lines = pathlib.Path(base.__file__).read_text('utf-8').splitlines()
  bare = [
      line.strip()
      for above, line in zip(lines, lines[1:], strict=False)
      if line.startswith('      ')
      and line.rstrip().endswith(',')
      and '=' in line
      and '#' not in line
      and '#' not in above
      and not line.rstrip().endswith('(')
  ]
  known = {'mlp_width', 'norm_eps', 'question_field', 'answer_field', 'name'}
  known |= {'demonstrations', 'optimizer', 'data', 'fsdp', 'tensor'}
  assert {line.split('=')[0] for line in bare} <= known


def test_base_resolves():
  made = _resolve()
  assert made.optimizer.lr == made.train.lr == 3e-4
  assert made.total_updates == 50
  assert made.model_config(300).vocab_size == 300
  assert made.data.split == 'train' and made.eval_data.split == 'heldout'


def test_the_critic_has_its_own_optimizer_and_the_policy_waits_for_it():
  made = _resolve(
      **CRITIC,
      critic__lr=0.01,
      critic__warmup_updates=5,
      critic__optimizer__name='muon',
  )
  assert made.critic_optimizer.lr == 0.01
  assert made.critic_optimizer.name == 'muon'
  assert made.critic_optimizer.total == 50
  assert made.optimizer.lr == 3e-4 and made.optimizer.total == 45


def test_derived_numbers():
  made = _resolve(train__mini_batches=4, train__epochs=2)
  got = settings.derived(made)
  assert got['episodes per iteration'] == 128
  assert got['groups per mini-batch'] == 4
  assert got['episodes per mini-batch'] == 32
  assert got['updates per iteration'] == 8
  assert got['updates in all'] == 400
  assert got['waves of slots per iteration'] == 2
  assert 'episodes in all: 6,400' in settings.describe(made)
  made = _resolve(filter__name='dynamic_sampling', filter__tries=3)
  assert settings.derived(made)['episodes per iteration, at most'] == 384
  assert not [name for name in settings.derived(made) if 'greedy' in name]
  made = _resolve(
      algorithm__advantage='remax',
      filter__name='dynamic_sampling',
      filter__tries=3,
  )
  got = settings.derived(made)
  assert got['greedy episodes per iteration'] == 16
  assert got['greedy episodes per iteration, at most'] == 48
  # 64 slots: two full waves, and the greedy ones.
  assert got['waves of slots per iteration'] == 3


@pytest.mark.parametrize(
    'changes, rule',
    [
        ({'train__mini_batches': 3}, 'train.prompts=16 is not a multiple'),
        ({'train__samples': 1}, 'a group of one has no advantage'),
        ({'train__pack_len': (128,)}, 'cannot hold a row'),
        ({'train__pack_len': ()}, 'train.pack_len=\\(\\)'),
        ({'train__pack_len': 256}, 'is no tuple'),
        ({'train__micro_batch': 3, 'mesh__data': 2}, 'train.micro_batch=3'),
        ({'sft__micro_batch': 3, 'mesh__fsdp': 2}, 'sft.micro_batch=3'),
        ({'rollout__slots': 63, 'mesh__data': 2}, 'rollout.slots=63'),
        ({'mesh__tensor': 8}, 'model.num_heads=4 is not a multiple'),
        ({'mesh__tensor': -1, 'mesh__data': -1}, 'at most one -1'),
        ({'rollout__max_action_tokens': 256,
          'rollout__max_episode_tokens': 256}, 'no room for a prompt'),
        ({'rollout__temperature': 0.0}, 'greedy episodes'),
        ({'env__tool_timeout': 60.0}, 'env.tool_timeout=60.0 must be below'),
          ({'env__tool_timeout': 30.0}, 'an honest call could go unanswered'),
          ({'tools__workers': 63}, 'tools.workers=63 is below'),
        ({'algorithm__kl_coef': 0.1},
         "algorithm.kl_coef=0.1 is not used: algorithm.kl is 'none'"),
        ({'algorithm__kl_placement': 'reward'}, "algorithm.kl is 'none'"),
        ({'algorithm__value_clip': 0.5},
         "algorithm.value_clip=0.5 is not used: critic.kind is 'none'"),
        ({'algorithm__loss': 'sft'}, 'RL would ignore the rewards'),
        ({'algorithm__advantage': 'gdpo',
          'algorithm__component_weights': (1.0, 2.0)},
         "component_weights=\\(1.0, 2.0\\) for rewards.names=\\('answer',\\)"),
        ({'algorithm__advantage': 'gdpo', 'rewards__weights': (0.0,)},
         'nothing but zeros'),
        ({'algorithm__kl': 'k3'}, 'algorithm.kl_coef=0 adds no KL'),
        ({'optimizer__warmup': 50}, 'optimizer.warmup=50 is not below'),
        ({'tokenizer__path': 'x'}, 'is not used by tokenizer.kind='),
        ({'tokenizer__kind': 'bpe'}, 'needs tokenizer.path'),
        ({'tokenizer__kind': 'gguf'}, 'needs tokenizer.path or weights.path'),
        ({'weights__path': 'x'}, 'cannot fit the checkpoint'),
        ({'weights__path': 'x', 'model__width': 64}, 'model.width=64 is not'),
        ({'sft__steps': 1, 'data__kind': 'jsonl', 'data__path': 'x'},
         'demonstrations exist for'),
        ({'eval__data__split': 'train'}, 'would not be held out'),
        ({'tokenizer__kind': 'byte'}, "did you mean 'bytes'"),
        ({'chat__template__system': 'x'}, "not used: chat.kind is 'tags'"),
        ({'chat__kind': 'tag'}, "did you mean 'tags'"),
        ({'tools__names': ('pyton',)}, "did you mean 'python'"),
        ({'chat__tags__code_tool': 'bash'}, "calls the tool 'bash'"),
        ({'env__name': 'tol'}, "did you mean 'tool'"),
        ({'rewards__names': ('anwser',)}, "did you mean 'answer'"),
        ({'rewards__weights': (1.0, 2.0)}, 'must be equally many'),
        ({'algorithm__clip_low': -1.0}, 'clip_low=-1.0'),
        ({'model__num_kv_heads': 3}, 'not a multiple of model.num_kv_heads=3'),
        ({'model__width': 1.5}, 'ModelConfig.width=1.5 is a float'),
        ({'checkpoint__every': 0}, 'checkpoint.every=0'),
        ({'algorithm__advantage': 'gae'}, "set critic.kind to 'own' or"),
        ({'critic__kind': 'own'}, "'grpo', which reads no values"),
        ({'critic__kind': 'both'}, "critic.kind='both' is none of"),
        ({'critic__lr': 1.0}, "critic.lr=1.0 is not used: critic.kind is 'no"),
        ({'critic__optimizer__b1': 0.5}, 'critic.optimizer.b1=0.5 is not used'),
        ({**CRITIC, 'critic__stop_gradient': True}, 'only a shared trunk'),
        ({**CRITIC, 'critic__value_coef': 0.0}, 'critic.value_coef=0.0'),
        ({**CRITIC, 'critic__warmup_updates': 50}, 'policy would never move'),
        ({**CRITIC, 'critic__warmup_updates': 20, 'optimizer__warmup': 30},
         'optimizer.warmup=30 is not below the 30 updates'),
        ({**CRITIC, 'critic__optimizer__warmup': 50},
         'critic.optimizer.warmup=50 is not below'),
        ({'filter__name': 'dynamic'}, "filter.name='dynamic' is none of"),
        ({'filter__name': 'dynamic_sampling', 'train__samples': 1,
          'algorithm__advantage': 'reinforce'}, 'never differs inside'),
        ({'filter__name': 'accuracy_band', 'train__iterations': 10**7},
         'named by 32 bits'),
        ({'overlong__penalty': -1.0}, 'overlong.penalty=-1.0'),
        ({'overlong__penalty': 1.0, 'overlong__buffer': 129},
         'overlong.buffer=129 is above the limit of 128'),
        ({'overlong__penalty': 1.0, 'overlong__limit': 160},
         'reaches the buffer'),
        ({'overlong__penalty': 1.0, 'algorithm__advantage': 'gdpo'},
         'would not see overlong.penalty'),
        ({'filter__tries': 3}, "filter.tries=3 is not used: filter.name is 'n"),
        ({'filter__name': 'top_p', 'filter__band_low': 0.1},
         'filter.band_low=0.1 is not used'),
        ({'filter__name': 'accuracy_band', 'filter__value': 0.5},
         'filter.value=0.5 is not used'),
        ({'overlong__buffer': 8, 'overlong__mask': True},
         'overlong.buffer=8 is not used: overlong.penalty is 0'),
        ({'filter__name': 'min_p', 'filter__smallest': True},
         'filter.smallest=True is not used'),
        ({'replay__max_age': 2}, 'replay.max_age=2 is not used'),
        ({'replay__share': 1.0}, 'replay.share=1.0 must lie'),
        ({'replay__capacity': 1, 'replay__share': 0.01}, 'less than one group'),
        ({'replay__admit': 'best'}, "replay.admit='best' is none of"),
        ({'replay__capacity': 8, 'replay__admit': 'mixed', 'train__samples': 1,
          'algorithm__advantage': 'reinforce'}, "replay.admit='mixed'"),
    ],
)  # fmt: skip
def test_impossible_combinations_name_the_rule(changes, rule):
  with pytest.raises(ValueError, match=rule):
    _resolve(**changes)


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'replay__capacity': 8}, 'with the replay'),
        ({'filter__name': 'dynamic_sampling'}, "filter 'dynamic_sampling'"),
        ({'filter__name': 'dynamic_sampling', 'filter__tries': 1}, None),
        ({'filter__name': 'top_share'}, None),
        ({'replay__capacity': 8, 'algorithm__correction': 'tis'}, None),
        ({'replay__capacity': 8, 'algorithm__rejection': 'token_k1'}, None),
        ({'replay__capacity': 8, 'train__old_logprobs': 'sampler'}, None),
        ({'replay__capacity': 8, 'train__old_logprobs': 'sampler',
          'algorithm__loss': 'reinforce'}, 'it has no ratio'),
        ({'algorithm__loss': 'reinforce', 'train__old_logprobs': 'sampler'},
         None),
        ({}, None),
    ],
)  # fmt: skip
def test_rows_of_older_policies_without_a_correction_are_warned_of(
    changes, words
):
  told = settings.describe(_resolve(**changes))
  assert told.count('warning') == (words is not None)
  assert (words or 'episodes') in told


WEIGHTED = {
    'rewards__names': ('answer', 'environment'),
    'rewards__weights': (1.0, 0.5),
}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({}, "give the reward 'environment' a weight"),
        (
            {**WEIGHTED, 'rewards__weights': (1.0, 0.0)},
            "'environment' a weight",
        ),
        (WEIGHTED, 'env.call_reward=0'),
        ({**WEIGHTED, 'env__call_reward': 0.2}, None),
        ({'algorithm__advantage': 'grpo'}, None),
    ],
)
def test_mt_grpo_without_turn_rewards_is_warned_of(changes, words):
  told = settings.describe(
      _resolve(**{'algorithm__advantage': 'mt_grpo', **changes})
  )
  assert told.count('warning') == (words is not None)
  assert (words or 'episodes') in told


def test_a_value_that_a_config_sets_can_be_taken_back():
  # Of a key without a default of its own, by what it would be filled with.
  changes = {'algorithm__loss': 'sapo', 'train__old_logprobs': 'recompute'}
  with pytest.raises(ValueError, match='clip_high=0.28 .* leave it at 0.0'):
    _resolve(algorithm__clip_high=0.28, **changes)
  made = _resolve(algorithm__clip_high=0.0, **changes)
  assert made.algorithm == _resolve(**changes).algorithm


def test_what_each_filter_reads_may_be_set():
  assert set(filters.READ) == set(filters.FILTERS)
  changed = {'value': 0.5, 'measure': 'sum', 'smallest': True, 'zeros': False}
  changed |= {'tries': 2, 'band_low': 0.1, 'band_high': 0.9}
  for name, keys in filters.READ.items():
    made = _resolve(
        filter__name=name, **{f'filter__{key}': changed[key] for key in keys}
    )
    assert all(getattr(made.filter, key) == changed[key] for key in keys)
  assert _resolve(overlong__mask=True).overlong.mask


# A value of each key of `config.algorithm` that some choice leaves unread.
SET = {
    'normalize_std': True, 'epsilon': 1e-3, 'gamma': 0.9, 'lam': 0.9,
    'high_gamma': 0.9, 'whiten': False, 'turn_rewards': False,
    'turn_coef': 0.5, 'step_coef': 0.5, 'similarity': 0.9, 'pooled': True,
    'component_weights': (2.0,), 'baseline': 'all', 'baseline_decay': 0.5,
    'baseline_window': 3, 'clip_low': 0.1, 'clip_high': 0.1, 'dual_clip': 3.0,
    'sapo_positive': 2.0, 'sapo_negative': 2.0, 'opsm_delta': 0.1,
    'norm_length': 9.0, 'correction_low': 1.0, 'correction_high': 4.0,
    'correction_normalize': True, 'rejection_low': 1.0, 'rejection_high': 4.0,
    'rejection_denominator': 'original', 'kl_coef': 0.1,
    'kl_placement': 'reward', 'kl_importance': True, 'kl_adaptive': True,
    'kl_target': 0.2, 'kl_horizon': 5.0,
}  # fmt: skip

# Keys that are read under another one alone.
UNDER = {
    'epsilon': {'normalize_std': True},
    'baseline_decay': {'baseline': 'exponential'},
    'baseline_window': {'baseline': 'window'},
    'kl_adaptive': {'kl_coef': 0.1},
    'kl_target': {'kl_adaptive': True, 'kl_coef': 0.1},
    'kl_horizon': {'kl_adaptive': True, 'kl_coef': 0.1},
}


def _algorithm(**changes):
  """The algorithm section of the base, changed and resolved."""
  common = dict(base.get_config().algorithm.items())
  critic = dict(base.get_config().critic.items())
  kind = (
      'own' if changes.get('advantage') in advantages.NEEDS_VALUES else 'none'
  )
  return settings._algorithm(
      {**common, **changes},
      common,
      options.RewardOptions(('answer',), (1.0,), 'answer'),
      settings._critic({**critic, 'kind': kind}, critic),
  )


@pytest.mark.parametrize('choice', choices.READ)
def test_what_a_choice_reads_may_be_set_and_the_rest_is_refused(choice):
  table = choices.READ[choice]
  about = set().union(*table.values())
  assert about <= set(SET)
  for chosen, read in table.items():
    common = {choice: chosen}
    if choice in ('baseline', 'normalize_std'):
      common['advantage'] = 'reinforce'
    if choice == 'kl_adaptive':
      common |= {'kl': 'k3', 'kl_coef': 0.1}
    if chosen == 'k1':  # it has no place in the loss
      common['kl_placement'] = 'reward'
    if chosen in ('dr_grpo', 'seq-mean-token-sum-norm'):
      common['norm_length'] = 5.0
    for key in sorted(about - common.keys()):
      if key == 'kl_importance' and chosen not in ('none', 'k3'):
        continue  # the reward has no ratio, others the wrong gradient with it
      if choice == 'kl' and chosen.endswith('+') and key == 'kl_placement':
        continue  # the reward has no gradient
      wanted = {**common, key: SET[key]}
      if key in read:
        under = UNDER.get(key, {})
        # gdpo divides by the std whatever normalize_std says.
        wanted |= under if under.keys() <= {*read, choice} else {}
        assert getattr(_algorithm(**wanted), key) == SET[key]
      else:
        with pytest.raises(ValueError, match=key):
          _algorithm(**wanted)


def test_gdpo_weighs_components_as_the_total_does():
  rewards = {
      'algorithm__advantage': 'gdpo',
      'rewards__names': ('answer', 'call_cost'),
      'rewards__weights': (1.0, -0.5),
  }
  assert _resolve(**rewards).algorithm.component_weights == (1.0, -0.5)
  own = _resolve(**rewards, algorithm__component_weights=(2.0, 0.0))
  assert own.algorithm.component_weights == (2.0, 0.0)


def test_a_penalty_for_length_reaches_mt_grpo():
  made = _resolve(algorithm__advantage='mt_grpo', overlong__penalty=1.0)
  assert made.overlong.penalty == 1.0


def test_a_cold_start_alone_may_name_the_loss_of_one():
  assert _resolve(train__iterations=0, algorithm__loss='sft')


def test_all_broken_rules_are_told_at_once():
  with pytest.raises(ValueError) as error:
    _resolve(train__mini_batches=3, train__samples=1)
  assert len(str(error.value).splitlines()) == 2


def test_a_file_as_held_out_set_needs_no_split():
  made = _resolve(
      data__kind='jsonl',
      data__path='a.jsonl',
      eval__data__kind='jsonl',
      eval__data__path='b.jsonl',
  )
  assert made.eval_data.path == 'b.jsonl'


def test_template_options_are_chosen_by_kind():
  made = _resolve(
      chat__kind='template',
      chat__template__variables=(('bos_token', '<s>'),),
      chat__template__stop_tokens=('<end>',),
  )
  assert made.chat['variables'] == {'bos_token': '<s>'}
  assert made.chat['stop_tokens'] == ('<end>',)
  assert made.chat['instructions'] is None


def test_mesh_is_checked_against_the_devices():
  made = _resolve(mesh__data=-1, mesh__tensor=2)
  assert settings.check_devices(made, 8) == (4, 1, 2)
  with pytest.raises(ValueError, match='needs 2 devices but 1'):
    settings.check_devices(made, 1)
  with pytest.raises(ValueError, match='rollout.slots=64'):
    settings.check_devices(_resolve(mesh__data=-1, train__micro_batch=6,
                                    sft__micro_batch=6), 3)  # fmt: skip


_PROGRAM = """
from agent_rl_jax.train import entry
from configs import base
CONFIG = entry.define_config()
def main(argv):
  made = entry.resolve(CONFIG.value, base.get_config())
  print('lr', made.train.lr, 'tools', made.tools)
entry.run(main, base.get_config())
"""


def _program(tmp_path, *arguments):
  path = tmp_path / 'program.py'
  path.write_text(_PROGRAM)
  root = base.__file__.rpartition('/configs/')[0]
  return subprocess.run(
      [sys.executable, str(path), *arguments],
      env={'PYTHONPATH': root, 'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      timeout=120,
  )


def test_overrides_on_a_command_line(tmp_path):
  done = _program(
      tmp_path,
      f'--config={base.__file__}',
      '--config.train.lr=1e-5',
      '--config.tools.names=()',
  )
  assert done.stdout == 'lr 1e-05 tools ()\n', done.stderr


@pytest.mark.parametrize(
    'override, words',
    [
        ('--config.train.lrr=1', "did you mean 'train.lr'?"),
        ('--config.train.samples=1', 'a group of one'),
    ],
)
def test_mistakes_end_a_program_with_a_message(tmp_path, override, words):
  done = _program(tmp_path, f'--config={base.__file__}', override)
  assert done.returncode == 2
  assert words in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.parametrize(
    'path, hint',
    [
        ('train.lrr', "'train.lrr'; did you mean 'train.lr'"),
        ('rolout.slots', "did you mean 'rollout.slots'"),
        ('sede', "did you mean 'seed'"),
    ],
)
def test_a_config_file_with_an_unknown_key_is_refused(path, hint):
  config = base.get_config()
  *parents, last = path.split('.')
  with config.unlocked():
    node = config
    for parent in parents:
      if parent not in node:
        node[parent] = {}
      node = node[parent]
    node[last] = 1
  with pytest.raises(ValueError, match='unknown config key') as error:
    settings.resolve(config, base.get_config())
  assert hint in str(error.value)
