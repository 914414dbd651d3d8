"""The names table covers exactly the parameters of models/policy.py."""

import dataclasses

import jax
import numpy as np
import pytest

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.weights import names

BASE = ModelConfig(
    vocab_size=17,
    num_layers=3,
    width=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_width=10,
)


@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('qkv_bias', [True, False])
@pytest.mark.parametrize('tied_head', [True, False])
def test_table_gives_the_policys_tree(tied_head, qkv_bias, qk_norm):
  config = dataclasses.replace(
      BASE, tied_head=tied_head, qkv_bias=qkv_bias, qk_norm=qk_norm
  )
  want = jax.eval_shape(lambda k: policy.init(config, k), jax.random.key(0))
  tree = {}
  for row in names.names(config):
    size = names.shape(config, row)
    size = (config.num_layers, *size) if row.stacked else size
    names.put(tree, row.path, jax.ShapeDtypeStruct(size, np.float32))
  assert jax.tree.structure(tree) == jax.tree.structure(want)
  assert jax.tree.leaves(tree) == jax.tree.leaves(want)
  assert names.count(config) == sum(x.size for x in jax.tree.leaves(want))


def test_checkpoint_shapes_by_hand():
  shapes = names.checkpoint_shapes(BASE, names.HF)
  assert shapes['model.layers.2.self_attn.k_proj.weight'] == (12, 12)
  assert shapes['model.layers.0.self_attn.q_proj.weight'] == (24, 12)
  assert shapes['model.layers.0.self_attn.o_proj.weight'] == (12, 24)
  assert shapes['model.layers.1.mlp.down_proj.weight'] == (12, 10)
  assert 'lm_head.weight' not in shapes
  assert len(shapes) == 2 + 3 * 9
  assert names.checkpoint_shapes(BASE, names.GGUF)['output_norm.weight'] == (
      12,
  )


def test_interleaved_rows_return_to_halves():
  config = dataclasses.replace(BASE, num_heads=2, num_kv_heads=2, head_dim=4)
  row = next(r for r in names.TABLE if r.path == 'blocks.q.kernel')
  # Rows of each head as the file keeps them: pair 0 (halves a, b), pair 1.
  stored = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
  out = names.from_checkpoint(config, row, stored, interleaved=True)
  np.testing.assert_array_equal(out, [[0, 1, 2, 3, 10, 11, 12, 13]])
  plain = names.from_checkpoint(config, row, stored, interleaved=False)
  np.testing.assert_array_equal(plain, stored.T)
  value = next(r for r in names.TABLE if r.path == 'blocks.v.kernel')
  same = names.from_checkpoint(config, value, stored, interleaved=True)
  np.testing.assert_array_equal(same, stored.T)
