"""Config files: unknown keys, types, splats, saving and comparing."""

import dataclasses
import json

import pytest

from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import options
from configs import base


def test_base_is_locked_and_names_the_near_key():
  config = base.get_config()
  with pytest.raises(AttributeError, match='"prompts"'):
    config.train.promps = 3


def test_base_refuses_a_wrong_type():
  config = base.get_config()
  with pytest.raises(TypeError):
    config.train.prompts = 'many'


@pytest.mark.parametrize(
    'argument, hint',
    [
        ('--config.train.lrr=1e-4', 'train.lr'),
        ('--config.trian.lr=1e-4', 'train.lr'),
        ('--config.optimizer.lr=1e-4', '.lr'),
        ('--config.slots=3', 'rollout.slots'),
        ('--noconfig.report.htm', 'report.html'),
    ],
)
def test_override_of_an_unknown_key_names_the_nearest(argument, hint):
  with pytest.raises(ValueError, match='unknown config key') as error:
    config_lib.check_overrides([argument], base.get_config())
  assert f"{hint}'?" in str(error.value)


def test_override_of_known_keys_passes():
  config_lib.check_overrides(
      [
          'prog',
          '--config=x.py',
          '--config.train.lr=1',
          '--noconfig.report.html',
      ],
      base.get_config(),
  )
  # What follows `--` is no flag.
  config_lib.check_overrides(['--', '--config.nope=1'], base.get_config())


def test_override_reports_every_unknown_key():
  with pytest.raises(ValueError) as error:
    config_lib.check_overrides(
        ['--config.zzz=1', '--config.train.lrr=1'], base.get_config()
    )
  assert 'zzz' in str(error.value) and 'lrr' in str(error.value)


def test_check_keys_finds_extra_and_missing_keys():
  config = base.get_config()
  config_lib.check_keys(config, base.get_config())
  with config.unlocked():
    config.train.lrr = 1.0
    del config.rollout.slots
  with pytest.raises(ValueError) as error:
    config_lib.check_keys(config, base.get_config())
  assert "'train.lrr'; did you mean 'train.lr'?" in str(error.value)
  assert "'rollout.slots' is missing" in str(error.value)


@dataclasses.dataclass(frozen=True)
class _Inner:
  n: int = 1


@dataclasses.dataclass(frozen=True)
class _Outer:
  rate: float
  name: str | None = None
  items: tuple[int, ...] = ()
  inner: _Inner = _Inner()


def test_section_splats_converts_and_nests():
  made = config_lib.section(
      {'rate': 2, 'items': [1, 2], 'inner': {'n': 3}}, _Outer, name='x'
  )
  assert made == _Outer(2.0, 'x', (1, 2), _Inner(3))
  assert isinstance(made.rate, float)


@pytest.mark.parametrize(
    'values, message',
    [
        ({'rate': 1.0, 'naem': 'x'}, "'naem' is not used by _Outer.*'name'"),
        ({'name': 'x'}, "_Outer needs 'rate'"),
        ({'rate': 'fast'}, "_Outer.rate='fast' is a str; give a float"),
        ({'rate': True}, 'is a bool'),
        ({'rate': 1.0, 'inner': {'n': 1.5}}, '_Inner.n=1.5 is a float'),
    ],
)
def test_section_errors_name_the_key(values, message):
  with pytest.raises(ValueError, match=message):
    config_lib.section(values, _Outer)


def test_a_key_that_is_provided_may_not_be_configured_too():
  with pytest.raises(ValueError, match="'rate' is not used"):
    config_lib.section({'rate': 1.0}, _Outer, rate=2.0)


def test_save_and_load_give_the_same_config(tmp_path):
  config = base.get_config()
  config.train.lr = 1e-4
  path = tmp_path / 'run' / 'config.json'
  config_lib.save(config, path)
  again = config_lib.load(path, base.get_config())
  assert config_lib.flatten(again) == config_lib.flatten(config)
  assert again.is_locked
  assert list(path.parent.iterdir()) == [path]


def test_load_refuses_a_key_that_is_gone(tmp_path):
  path = tmp_path / 'config.json'
  values = config_lib.plain(base.get_config())
  values['train']['lrr'] = 1
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match="did you mean 'train.lr'"):
    config_lib.load(path, base.get_config())


def test_digest_ignores_reporting_and_sees_what_matters():
  one, two = base.get_config(), base.get_config()
  two.run_dir = 'elsewhere'
  two.report.html = False
  two.eval.every = 3
  assert config_lib.digest(one) == config_lib.digest(two)
  assert config_lib.differences(one, two) == []
  two.train.prompts = 4
  assert config_lib.digest(one) != config_lib.digest(two)
  assert config_lib.differences(one, two) == ['train.prompts: 16 -> 4']


@pytest.mark.parametrize(
    'name, key, value',
    [
        ('train', 'prompts', 0),
        ('train', 'old_logprobs', 'guess'),
        ('train', 'lr', float('nan')),
        ('checkpoint', 'keep', 0),
        ('report', 'log_every', 0),
    ],
)
def test_options_refuse_senseless_values(name, key, value):
  classes = {
      'train': options.TrainOptions,
      'checkpoint': options.CheckpointOptions,
      'report': options.ReportOptions,
  }
  config = base.get_config()
  config[name][key] = value
  with pytest.raises(ValueError, match=f'{name}.{key}'):
    config_lib.section(config[name], classes[name])
