"""The policy: pure functions of a parameter tree around the linen block.

Parameters are {'embed': {'table'}, 'blocks': stacked over layers,
'final_norm': {'scale'}, 'head': {'table'} when untied}.  Training scans the
stacked blocks; decoding loops over `unstack`ed ones with one cache buffer a
layer.  Invariant: every path applies the same block to the same values.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from agent_rl_jax.models.attention import segment_attention
from agent_rl_jax.models.config import DTYPES, ModelConfig
from agent_rl_jax.models.layers import Attend, Block, RMSNorm, rotary
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array
Params = dict[str, Any]


def _init_boxed(config: ModelConfig, key: Array) -> Params:
  """Parameters boxed with their logical axis names."""
  param_dtype = DTYPES[config.param_dtype]
  embed_key, block_key, head_key = jax.random.split(key, 3)
  x = jnp.zeros((1, 1, config.width), DTYPES[config.dtype])
  angles = jnp.zeros((1, 1, config.head_dim // 2), jnp.float32)
  block = Block(config)

  def init_block(layer_key):
    attend = lambda q, k, v: (q, None)
    return block.init(layer_key, x, angles, attend)['params']

  blocks = jax.vmap(init_block)(jax.random.split(block_key, config.num_layers))
  blocks = jax.tree.map(
      lambda p: p.replace(names=('layers', *p.names)),
      blocks,
      is_leaf=lambda p: isinstance(p, nn.Partitioned),
  )
  table = nn.with_partitioning(
      nn.initializers.normal(config.width**-0.5), ('vocab', 'embed')
  )
  shape = (config.vocab_size, config.width)
  params = {
      'embed': {'table': table(embed_key, shape, param_dtype)},
      'blocks': blocks,
      'final_norm': RMSNorm(config.norm_eps, param_dtype).init(key, x)[
          'params'
      ],
  }
  if not config.tied_head:
    params['head'] = {'table': table(head_key, shape, param_dtype)}
  return params


def init(config: ModelConfig, key: Array) -> Params:
  """Fresh parameters; traceable, so that a jit may place them on a mesh."""
  return nn.unbox(_init_boxed(config, key))


def axes(config: ModelConfig) -> Any:
  """The parameter tree with a tuple of logical axis names at each leaf."""
  boxed = jax.eval_shape(
      lambda key: _init_boxed(config, key), jax.random.key(0)
  )
  return jax.tree.map(
      lambda p: tuple(p.names),
      boxed,
      is_leaf=lambda p: isinstance(p, nn.Partitioned),
  )


def unstack(params: Params) -> Params:
  """Blocks as a list of one tree per layer: the layout for decoding."""
  num_layers = jax.tree.leaves(params['blocks'])[0].shape[0]
  layers = [
      jax.tree.map(lambda x, i=i: x[i], params['blocks'])
      for i in range(num_layers)
  ]
  return {**params, 'blocks': layers}


def unstacked_axes(config: ModelConfig) -> Any:
  """`axes` for the layout that `unstack` gives."""
  tree = axes(config)
  layer = jax.tree.map(
      lambda names: names[1:],
      tree['blocks'],
      is_leaf=lambda x: isinstance(x, tuple),
  )
  return {**tree, 'blocks': [layer] * config.num_layers}


def embed(
    config: ModelConfig, params: Params, tokens_BxT: Array, part: Partition
) -> Array:
  """Embeddings [B, T, D] in the computation type."""
  x = params['embed']['table'].astype(DTYPES[config.dtype])[tokens_BxT]
  return part.constrain(x, 'batch', 'length', None)


def apply_block(
    config: ModelConfig,
    block_params: Params,
    x_BxTxD: Array,
    angles: Array,
    attend: Attend,
    part: Partition,
) -> tuple[Array, Any]:
  """One block of the stack, its output pinned to the batch sharding."""
  x, carried = Block(config).apply(
      {'params': block_params}, x_BxTxD, angles, attend
  )
  return part.constrain(x, 'batch', 'length', None), carried


def final_norm(config: ModelConfig, params: Params, x_BxTxD: Array) -> Array:
  return RMSNorm(config.norm_eps, DTYPES[config.param_dtype]).apply(
      {'params': params['final_norm']}, x_BxTxD
  )


def hidden(
    config: ModelConfig,
    params: Params,
    tokens_BxT: Array,
    positions_BxT: Array,
    segment_BxT: Array,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Array:
  """Final hidden states [B, T, D] of packed rows, without any cache.

  Args:
    config: Shape of the policy.
    params: Parameters, blocks stacked or unstacked.
    tokens_BxT: Token ids.
    positions_BxT: Position of each token within its segment.
    segment_BxT: 0 on padding, else which packed row a token belongs to.
    part: Mesh and rules.
  """
  x = embed(config, params, tokens_BxT, part)
  angles = rotary(positions_BxT, config.head_dim, config.rope_theta)

  def attend(q, k, v):
    return segment_attention(q, k, v, segment_BxT), None

  def step(x, block_params):
    return apply_block(config, block_params, x, angles, attend, part)

  if config.remat:
    step = jax.checkpoint(step)
  if isinstance(params['blocks'], list):
    for block_params in params['blocks']:
      x, _ = step(x, block_params)
  else:
    x, _ = jax.lax.scan(step, x, params['blocks'])
  return final_norm(config, params, x)


def head_table(params: Params) -> Array:
  """The output head as [V, D]."""
  return params['head' if 'head' in params else 'embed']['table']


def logits(
    config: ModelConfig,
    params: Params,
    hidden_BxTxD: Array,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Array:
  """Logits [B, T, V], float32."""
  table = head_table(params).astype(DTYPES[config.dtype])
  out = jnp.einsum(
      'btd,vd->btv', hidden_BxTxD, table, preferred_element_type=jnp.float32
  )
  return part.constrain(out, 'batch', 'length', 'vocab')
