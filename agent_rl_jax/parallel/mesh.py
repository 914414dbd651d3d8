"""Device meshes: one for training over all processes, one for rollouts.

Axes are always (data, fsdp, tensor); a rollout mesh has fsdp = 1 and lies
inside one process, so that tool latency never decides which collective a
process issues next.  Nothing here is global: meshes are passed as values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ('data', 'fsdp', 'tensor')


@dataclasses.dataclass(frozen=True)
class MeshOptions:
  """Sizes of the mesh axes; one of them may be -1, "all that is left"."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    sizes = dataclasses.astuple(self)
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
      raise ValueError(
          f'mesh sizes {dict(zip(AXES, sizes, strict=True))}: give positive'
          ' sizes, and at most one -1'
      )

  def resolve(self, num_devices: int) -> tuple[int, int, int]:
    """Sizes with -1 filled in; raises ValueError when they do not fit."""
    sizes = list(dataclasses.astuple(self))
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
      sizes[sizes.index(-1)] = max(num_devices // known, 1)
    if math.prod(sizes) > num_devices:
      raise ValueError(
          f'mesh {dict(zip(AXES, sizes, strict=True))} needs'
          f' {math.prod(sizes)} devices but {num_devices} are present; lower'
          ' mesh.data, mesh.fsdp or mesh.tensor'
      )
    return tuple(sizes)


def make_mesh(
    options: MeshOptions, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Training mesh over the first data * fsdp * tensor of `devices`."""
  devices = list(devices if devices is not None else jax.devices())
  sizes = options.resolve(len(devices))
  grid = np.array(devices[: math.prod(sizes)]).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_rollout_mesh(train_mesh: Mesh, tensor: int | None = None) -> Mesh:
  """This process's devices of the training mesh as (data, 1, tensor).

  Args:
    train_mesh: The training mesh.
    tensor: Tensor parallelism of the rollout; the training mesh's by default.

  Raises:
    ValueError: when `tensor` does not divide the local device count.
  """
  local = [
      d
      for d in train_mesh.devices.flat
      if d.process_index == jax.process_index()
  ]
  tensor = train_mesh.shape['tensor'] if tensor is None else tensor
  if len(local) % tensor:
    raise ValueError(
        f'rollout tensor parallelism {tensor} does not divide the'
        f' {len(local)} devices of this process; a rollout mesh lies inside'
        ' one process, so lower mesh.tensor'
    )
  grid = np.array(local).reshape(len(local) // tensor, 1, tensor)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
