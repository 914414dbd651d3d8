"""Publishing: the trainer's parameters in the layout that rollouts read.

Blocks are unstacked into one tree per layer, cast to the computation type and
laid out on the rollout mesh.  Leaves out when this happens.  Invariant: what
is published shares no buffer with the train state, which is donated next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import DTYPES, ModelConfig
from agent_rl_jax.parallel.rules import Partition, is_axes


def make_publish(
    config: ModelConfig,
    train_part: Partition = Partition(),  # noqa: B008 (frozen)
    rollout_part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Callable[[Any], Any]:
  """Compiled `params -> rollout params`.

  Args:
    config: Shape of the policy; `config.dtype` is that of the rollout.
    train_part: Where the parameters are.
    rollout_part: Where they go; the same devices in the same order.

  Raises:
    ValueError: when one side has a mesh and the other has not, or their
      devices differ.
  """
  meshes = [part.mesh for part in (train_part, rollout_part)]
  if (meshes[0] is None) != (meshes[1] is None):
    raise ValueError('give both the trainer and the rollout a mesh, or neither')
  if meshes[0] is not None:
    train, rollout = ([d.id for d in m.devices.flat] for m in meshes)
    if train != rollout:
      raise ValueError(
          f'the rollout mesh has devices {rollout} and the training mesh'
          f' {train}; build it with make_rollout_mesh(training mesh)'
      )

  def publish(params):
    # Norm scales stay as they are stored: training applies them in float32.
    # jnp.copy keeps leaves that need no cast from aliasing the input.
    cast = jax.tree.map(
        lambda names, x: jnp.copy(
            x if 'norm' in names else x.astype(DTYPES[config.dtype])
        ),
        policy.axes(config),
        params,
        is_leaf=is_axes,
    )
    return policy.unstack(cast)

  if meshes[1] is None:
    return jax.jit(publish)
  shardings = rollout_part.tree(policy.unstacked_axes(config))
  return jax.jit(publish, out_shardings=shardings)
