"""The train state: what one update reads and replaces, and where it lives.

Leaves out the update itself and everything on the host (cursor, counters).
Invariant: `frozen` is never differentiated and never updated; every leaf of
the optimizer state that mirrors a parameter is sharded as that parameter is.
"""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from agent_rl_jax.models import policy, value
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array


@flax.struct.dataclass
class TrainState:
  """State of training, donated to every update.

  Attributes:
    step: int32 [], updates attempted, skipped ones included.
    skipped: int32 [], updates that changed nothing: their gradient was not
      finite, or no token had weight.
    trainable: {'policy': parameters}, and 'critic' if there is one.
    frozen: {'policy': parameters of the reference} or None.
    opt_state: State of the optimizer of `trainable`.
  """

  step: Array
  skipped: Array
  trainable: dict[str, Any]
  frozen: dict[str, Any] | None
  opt_state: Any


def trainable_axes(config: ModelConfig, critic: str = 'none') -> dict[str, Any]:
  """Logical axes of `TrainState.trainable`; what `make_optimizer` takes.

  Args:
    config: Shape of the policy.
    critic: One of `value.CRITICS`.
  """
  axes = {'policy': policy.axes(config)}
  if critic != 'none':
    axes['critic'] = value.axes(config, critic)
  return axes


def _build(
    config: ModelConfig,
    params: Any,
    tx: optax.GradientTransformation,
    reference: bool,
    critic: str,
) -> TrainState:
  # Copies, because the state is donated: it may share no buffer with the
  # caller's parameters, nor its reference with its policy.
  copy = lambda tree: jax.tree.map(jnp.copy, tree)
  trainable = {'policy': copy(params)}
  if critic != 'none':
    trainable['critic'] = value.init(config, critic, params)
  return TrainState(
      step=jnp.zeros((), jnp.int32),
      skipped=jnp.zeros((), jnp.int32),
      trainable=trainable,
      frozen={'policy': copy(params)} if reference else None,
      opt_state=tx.init(trainable),
  )


def _shapes(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    reference: bool,
    critic: str,
) -> TrainState:
  return jax.eval_shape(
      lambda key: _build(
          config, policy.init(config, key), tx, reference, critic
      ),
      jax.random.key(0),
  )


def state_shardings(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    *,
    reference: bool = False,
    critic: str = 'none',
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> TrainState | None:
  """Sharding of every leaf of the state; None without a mesh."""
  if part.mesh is None:
    return None
  shapes = _shapes(config, tx, reference, critic)
  trainable = part.tree(trainable_axes(config, critic))
  by_path = dict(jax.tree_util.tree_leaves_with_path(trainable))

  def of_optimizer(path, leaf):
    del leaf
    # Optax keeps moments in trees shaped like the parameters, somewhere
    # inside its own tuples: such a leaf's path ends with the parameter's.
    for start in range(len(path)):
      if path[start:] in by_path:
        return by_path[path[start:]]
    return part.replicated()

  return TrainState(
      step=part.replicated(),
      skipped=part.replicated(),
      trainable=trainable,
      frozen={'policy': trainable['policy']} if reference else None,
      opt_state=jax.tree_util.tree_map_with_path(
          of_optimizer, shapes.opt_state
      ),
  )


def abstract_state(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    *,
    reference: bool = False,
    critic: str = 'none',
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> TrainState:
  """The state as ShapeDtypeStructs with shardings, for restoring."""
  shapes = _shapes(config, tx, reference, critic)
  shardings = state_shardings(
      config, tx, reference=reference, critic=critic, part=part
  )
  if shardings is None:
    return shapes
  return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=sharding
      ),
      shapes,
      shardings,
  )


def init_state(
    config: ModelConfig,
    tx: optax.GradientTransformation,
    key: Array,
    *,
    params: Any = None,
    reference: bool = False,
    critic: str = 'none',
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> TrainState:
  """A state at step 0, made where it will live.

  Args:
    config: Shape of the policy.
    tx: Optimizer of `{'policy': parameters}`, and of 'critic' with one.
    key: Of the fresh parameters; the values do not depend on the mesh.
    params: Parameters to start from (loaded, or of an earlier stage) instead
      of fresh ones; they are copied and cast to `config.param_dtype`.
    reference: Keep the starting parameters as the frozen reference.
    critic: One of `value.CRITICS`; an own trunk begins as the policy's.
    part: Mesh and rules.

  Raises:
    ValueError: when `params` is another tree than `config` describes.
  """
  shardings = state_shardings(
      config, tx, reference=reference, critic=critic, part=part
  )
  jit = lambda fn: jax.jit(fn, out_shardings=shardings)
  build = lambda params: _build(config, params, tx, reference, critic)
  if params is None:
    return jit(lambda key: build(policy.init(config, key)))(key)
  want = _shapes(config, tx, False, critic).trainable['policy']
  _check_params(params, want)

  def from_params(params):
    return build(jax.tree.map(lambda x, w: x.astype(w.dtype), params, want))

  if shardings is not None:
    params = jax.device_put(params, shardings.trainable['policy'])
  return jit(from_params)(params)


def _check_params(params: Any, want: Any) -> None:
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='.')
  shapes = lambda tree: {
      name(path): tuple(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
  have, need = shapes(params), shapes(want)
  for key in sorted({*have, *need}):
    if have.get(key) != need.get(key):
      raise ValueError(
          f'parameter {key} has shape {have.get(key)}, the model section'
          f' describes {need.get(key)}; make the two agree'
      )
