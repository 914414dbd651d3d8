"""Logical axis names to mesh axes, as static values.

`Partition` is a mesh and a rule table; it is hashable, so that functions
close over it or take it as a static argument.  There is no rule context and
no ambient mesh: those are read when tracing but are not part of the jit
cache key, so a second call would silently reuse the first one's sharding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TRAIN_RULES = (
    ('batch', ('data', 'fsdp')),
    ('embed', 'fsdp'),
    ('heads', 'tensor'),
    ('kv_heads', 'tensor'),
    ('mlp', 'tensor'),
    ('vocab', 'tensor'),
)
ROLLOUT_RULES = (
    ('batch', 'data'),
    ('heads', 'tensor'),
    ('kv_heads', 'tensor'),
    ('mlp', 'tensor'),
    ('vocab', 'tensor'),
)


def is_axes(value: Any) -> bool:
  """Whether `value` is a tuple of logical axis names, a leaf of an axes tree."""
  return isinstance(value, tuple) and all(
      name is None or isinstance(name, str) for name in value
  )


@dataclasses.dataclass(frozen=True)
class Partition:
  """A mesh with its rules; `mesh=None` means one device and no constraint."""

  mesh: Mesh | None = None
  rules: tuple[tuple[str, Any], ...] = TRAIN_RULES

  def spec(self, *axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions are named `axes`."""
    table = dict(self.rules)
    return PartitionSpec(*(table.get(name) for name in axes))

  def sharding(self, *axes: str | None) -> NamedSharding | None:
    """NamedSharding of such an array, or None without a mesh."""
    if self.mesh is None:
      return None
    return NamedSharding(self.mesh, self.spec(*axes))

  def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins `x` inside a compiled function; the identity without a mesh."""
    if self.mesh is None:
      return x
    if len(axes) != x.ndim:
      raise ValueError(f'{len(axes)} axis names {axes} for shape {x.shape}')
    return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

  def tree(self, axes_tree: Any) -> Any:
    """Shardings of a whole tree of axis-name tuples (None without a mesh)."""
    return jax.tree.map(
        lambda axes: self.sharding(*axes), axes_tree, is_leaf=is_axes
    )

  def size(self, name: str) -> int:
    """Number of shards that a dimension called `name` is cut into."""
    if self.mesh is None:
      return 1
    axes = dict(self.rules).get(name)
    if axes is None:
      return 1
    axes = (axes,) if isinstance(axes, str) else axes
    size = 1
    for axis in axes:
      size *= self.mesh.shape[axis]
    return size

  def replicated(self) -> NamedSharding | None:
    return self.sharding()
