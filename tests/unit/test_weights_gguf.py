"""The GGUF reader against the writer and reader of the `gguf` package."""

import numpy as np
import pytest

from agent_rl_jax.weights import load as load_lib
from agent_rl_jax.weights.gguf import GgufFile
from tests.equivalence import parity_weights

gguf = pytest.importorskip('gguf', reason='the [hub] extra is not installed')
KINDS = gguf.GGMLQuantizationType


def _write(path, arch, fields, tensors):
  """tensors: name -> (array, kind), quantized by the package."""
  writer = gguf.GGUFWriter(path, arch)
  for add, key, value in fields:
    getattr(writer, f'add_{add}')(key, value)
  for name, (array, kind) in tensors.items():
    if kind in (KINDS.F32, KINDS.F16):
      writer.add_tensor(name, array)
    else:
      writer.add_tensor(name, array, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_metadata_of_every_type(tmp_path):
  fields = [
      ('uint8', 'a', 200),
      ('int8', 'b', -3),
      ('uint16', 'c', 60_000),
      ('int32', 'd', -70_000),
      ('uint64', 'e', 2**40),
      ('float32', 'f', 0.5),
      ('float64', 'g', 0.1),
      ('bool', 'h', True),
      ('string', 'i', 'naïve \n 🙂'),
      ('array', 'j', ['<|im_start|>', '', 'Ġthe']),
      ('array', 'k', [1, 2, 3]),
      ('array', 'l', [0.5, 1.5]),
  ]
  x = np.ones((2, 3), np.float32)
  file = GgufFile(
      _write(tmp_path / 'm.gguf', 'x', fields, {'x': (x, KINDS.F32)})
  )
  for _, key, value in fields:
    assert file.fields[key] == value, key
  assert file.fields['general.architecture'] == 'x'
  assert file.shapes == {'x': (2, 3)}
  np.testing.assert_array_equal(file.read('x'), x)


@pytest.mark.parametrize(
    'kind', ['F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0']
)
def test_quantized_tensors(kind, tmp_path):
  kind = KINDS[kind]
  rng = np.random.default_rng(0)
  x = rng.standard_normal((6, 64)).astype(np.float32)
  stored = (
      x.astype(np.float16)
      if kind == KINDS.F16
      else gguf.quants.quantize(x, kind)
  )
  # A first tensor of odd size, so that the second one needs its alignment.
  file = GgufFile(
      _write(
          tmp_path / 'm.gguf',
          'x',
          [],
          {'odd': (np.ones(3, np.float32), KINDS.F32), 'x': (stored, kind)},
      )
  )
  assert file.shapes['x'] == (6, 64)
  out = file.read('x')
  assert out.dtype == np.float32 and out.shape == (6, 64)
  tolerance = {'F16': 2e-3, 'BF16': 2e-2, 'Q8_0': 2e-2}.get(kind.name, 0.35)
  np.testing.assert_allclose(out, x, rtol=0, atol=tolerance)
  np.testing.assert_array_equal(file.read('odd'), np.ones(3))


@pytest.mark.parametrize('kind', ['Q2_K', 'Q3_K', 'Q4_K', 'Q5_K', 'Q6_K'])
def test_k_quants_read_as_the_package_reads_them(kind, tmp_path):
  kind = KINDS[kind]
  size = gguf.GGML_QUANT_SIZES[kind][1]
  raw = np.random.default_rng(1).integers(0, 60, (4, 2 * size)).astype(np.uint8)
  path = _write(tmp_path / 'm.gguf', 'x', [], {'x': (raw, kind)})
  out = GgufFile(path).read('x')
  assert out.shape == (4, 512)
  (tensor,) = gguf.GGUFReader(path).tensors
  want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  np.testing.assert_array_equal(out, want)


def test_damaged_files_are_named(tmp_path):
  x = np.ones((8, 64), np.float32)
  path = _write(
      tmp_path / 'm.gguf', 'x', [('array', 'j', ['a', 'b'])],
      {'x': (x, KINDS.F32)},
  )  # fmt: skip
  whole = path.read_bytes()
  short = tmp_path / 'short.gguf'
  short.write_bytes(whole[:-100])
  with pytest.raises(ValueError, match='cut short: x ends'):
    GgufFile(short).read('x')
  for size in range(5, 120, 7):
    short.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='short.gguf: damaged'):
      GgufFile(short)
  short.write_bytes(b'version https://git-lfs.github.com/spec/v1\n')
  with pytest.raises(ValueError, match='no GGUF file'):
    GgufFile(short)
  short.write_bytes(whole[:4] + (1).to_bytes(4, 'big') + whole[8:])
  with pytest.raises(ValueError, match='version'):
    GgufFile(short)
  with pytest.raises(FileNotFoundError):
    GgufFile(tmp_path / 'none.gguf')


_NAMES = {
    'embed_tokens': 'token_embd', 'norm': 'output_norm',
    'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm',
    'q_proj': 'attn_q', 'k_proj': 'attn_k', 'v_proj': 'attn_v',
    'o_proj': 'attn_output', 'gate_proj': 'ffn_gate', 'up_proj': 'ffn_up',
    'down_proj': 'ffn_down', 'q_norm': 'attn_q_norm', 'k_norm': 'attn_k_norm',
    'lm_head': 'output',
}  # fmt: skip


def _gguf_of(path, raw, tensors):
  """What llama.cpp's converter writes for a Hugging Face checkpoint."""
  arch = raw['model_type']
  heads = raw['num_attention_heads']
  head_dim = raw.get('head_dim', raw['hidden_size'] // heads)
  fields = [
      ('uint32', f'{arch}.block_count', raw['num_hidden_layers']),
      ('uint32', f'{arch}.embedding_length', raw['hidden_size']),
      ('uint32', f'{arch}.feed_forward_length', raw['intermediate_size']),
      ('uint32', f'{arch}.attention.head_count', heads),
      ('uint32', f'{arch}.attention.head_count_kv', raw['num_key_value_heads']),
      ('uint32', f'{arch}.attention.key_length', head_dim),
      ('float32', f'{arch}.rope.freq_base', raw['rope_theta']),
      ('float32', f'{arch}.attention.layer_norm_rms_epsilon',
       raw['rms_norm_eps']),
  ]  # fmt: skip
  out = {}
  for name, array in tensors.items():
    *scope, module, leaf = name.split('.')
    count = {'q_proj': heads, 'k_proj': raw['num_key_value_heads']}.get(module)
    if count and arch == 'llama':
      split = array.reshape(count, 2, head_dim // 2, *array.shape[1:])
      array = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
    layer = f'blk.{scope[2]}.' if 'layers' in scope else ''
    out[f'{layer}{_NAMES[module]}.{leaf}'] = (array, KINDS.F32)
  return _write(path, arch, fields, out)


@pytest.mark.parametrize('family', sorted(parity_weights.CONFIGS))
def test_gguf_and_safetensors_load_alike(family, tmp_path):
  raw = parity_weights.CONFIGS[family]
  folder = parity_weights.write_folder(tmp_path / 'hf', raw, 3)
  path = _gguf_of(tmp_path / 'm.gguf', raw, parity_weights.tensors(raw, 3))
  config, params = load_lib.load(path)
  want_config, want = load_lib.load(folder)
  assert config == want_config
  import jax

  assert jax.tree.structure(params) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, params, want)
