"""Optimizers as optax chains: AdamW, Muon and SGD, with their schedules.

Global-norm clipping and the skipping of non-finite updates are not here: the
train step does both, because both need the norm of the whole gradient.
Invariant: which leaves are decayed or orthogonalized follows from their
logical axis names alone, never from parameter names or ranks, so that a
layer-stacked leaf [L, D, F] is treated as L matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agent_rl_jax.parallel import rules

Axes = Any  # tree of tuples of logical axis names, as `policy.axes` gives


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
  """Options of the optimizer; `lr` is its peak value.

  Attributes:
    name: Key of OPTIMIZERS.
    lr: Peak learning rate.
    schedule: Key of SCHEDULES: what happens after the warm-up.
    warmup: Updates of linear warm-up; the first has lr / warmup.
    total: Updates until the schedule ends; unused by 'constant'.
    final: Fraction of lr that remains at the end of the schedule.
    b1: First-moment decay of Adam; momentum of 'sgd'.
    b2: Second-moment decay of Adam.
    eps: Added to Adam's denominator and to Muon's norm.
    momentum: Momentum of Muon.
    weight_decay: Decoupled decay of matrices; norms, biases and embeddings
      (leaves with a 'vocab' axis) are not decayed.
    max_grad_norm: Global-norm clip, applied by the train step; 0 = none.
  """

  name: str = 'adamw'
  lr: float = 3e-4
  schedule: str = 'constant'
  warmup: int = 0
  total: int = 0
  final: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  momentum: float = 0.95
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0

  def __post_init__(self):
    if self.name not in OPTIMIZERS:
      raise ValueError(
          f'optimizer name={self.name!r} is unknown; choose one of'
          f' {sorted(OPTIMIZERS)}.'
      )
    if self.schedule not in SCHEDULES:
      raise ValueError(
          f'optimizer schedule={self.schedule!r} is unknown; choose one of'
          f' {sorted(SCHEDULES)}.'
      )
    for name in ('lr', 'weight_decay', 'max_grad_norm'):
      if not getattr(self, name) >= 0:
        raise ValueError(
            f'optimizer {name}={getattr(self, name)} is negative or not a'
            ' number; give 0 or more.'
        )
    for name in ('b1', 'b2', 'momentum'):
      if not 0 <= getattr(self, name) < 1:
        raise ValueError(
            f'optimizer {name}={getattr(self, name)} is not in [0, 1).'
        )
    if not self.eps > 0:
      raise ValueError(f'optimizer eps={self.eps} must be above 0.')
    if not 0 <= self.final <= 1:
      raise ValueError(f'optimizer final={self.final} is not in [0, 1].')
    if self.warmup < 0:
      raise ValueError(f'optimizer warmup={self.warmup} must be 0 or more.')
    if self.schedule != 'constant' and self.total <= self.warmup:
      raise ValueError(
          f'optimizer schedule={self.schedule!r} ends at total={self.total}'
          f' updates, which must be more than warmup={self.warmup}.'
      )


def _cosine(fraction: jax.Array, final: float) -> jax.Array:
  return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * fraction))


SCHEDULES: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    'constant': lambda fraction, final: jnp.ones_like(fraction),
    'linear': lambda fraction, final: 1 - (1 - final) * fraction,
    'cosine': _cosine,
}


def learning_rate(options: OptimizerOptions, count: jax.Array) -> jax.Array:
  """Learning rate of update number `count` (from 0), float32 scalar."""
  count = jnp.asarray(count, jnp.float32)
  span = max(options.total - options.warmup, 1)
  fraction = jnp.clip((count - options.warmup) / span, 0.0, 1.0)
  warm = jnp.minimum(1.0, (count + 1) / max(options.warmup, 1))
  return (
      options.lr * warm * SCHEDULES[options.schedule](fraction, options.final)
  )


def _is_matrix(names: tuple[str | None, ...]) -> bool:
  """A projection between features: two named axes, the layer axis aside."""
  named = [name for name in names if name not in (None, 'layers')]
  return len(named) >= 2 and 'vocab' not in named


def matrix_mask(axes: Axes) -> Any:
  """Tree of bool: True on matrices, False on norms, biases, embeddings."""
  return jax.tree.map(_is_matrix, axes, is_leaf=rules.is_axes)


def _dimension_numbers(names: tuple[str | None, ...]):
  """Muon's view of a leaf: [layers,] in, out; None for what Adam takes."""
  if not _is_matrix(names):
    return None
  features = [i for i, name in enumerate(names) if name != 'layers']
  if len(features) != 2:
    raise ValueError(
        f'muon cannot tell input from output in a leaf with axes {names};'
        ' matrices are [in, out], stacked on an axis named layers.'
    )
  return optax.contrib.MuonDimensionNumbers(features[0], features[1])


def _adamw(options: OptimizerOptions, rate, axes: Axes):
  return optax.adamw(
      rate,
      b1=options.b1,
      b2=options.b2,
      eps=options.eps,
      weight_decay=options.weight_decay,
      mask=matrix_mask(axes),
  )


def _muon(options: OptimizerOptions, rate, axes: Axes):
  # optax takes every rank-2 leaf when not told otherwise, which would
  # orthogonalize the embedding and leave stacked layers to Adam.
  return optax.contrib.muon(
      rate,
      beta=options.momentum,
      eps=options.eps,
      weight_decay=options.weight_decay,
      adam_b1=options.b1,
      adam_b2=options.b2,
      muon_weight_dimension_numbers=jax.tree.map(
          _dimension_numbers, axes, is_leaf=rules.is_axes
      ),
  )


def _sgd(options: OptimizerOptions, rate, axes: Axes):
  return optax.chain(
      optax.add_decayed_weights(options.weight_decay, matrix_mask(axes)),
      optax.sgd(rate, momentum=options.b1 or None),
  )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    'adamw': _adamw,
    'muon': _muon,
    'sgd': _sgd,
}


def make_optimizer(
    options: OptimizerOptions, axes: Axes
) -> optax.GradientTransformation:
  """Builds the optimizer for parameters whose logical axes are `axes`.

  Muon (Jordan et al., 2024) orthogonalizes the momentum of each layer's
  matrices; embeddings, heads, norms and biases get AdamW at the same rate.
  Clipping is left to the train step.
  """

  def rate(count):
    return learning_rate(options, count)

  return OPTIMIZERS[options.name](options, rate, axes)


def make_optimizers(
    options: Mapping[str, OptimizerOptions], axes: Mapping[str, Axes]
) -> optax.GradientTransformation:
  """One optimizer for each top-level key of the parameters.

  Args:
    options: By key; each key's schedule counts its own updates.
    axes: Of the whole tree, by the same keys.

  Returns:
    With one key `make_optimizer` of it; else a transformation whose state is
    {key: state of that key's optimizer}.
  """
  if set(options) != set(axes):
    raise ValueError(
        f'optimizers for {sorted(options)} and parameters {sorted(axes)}: give'
        ' one for each'
    )
  chains = {
      name: make_optimizer(options[name], {name: axes[name]}) for name in axes
  }
  if len(chains) == 1:
    return next(iter(chains.values()))

  def init(params):
    return {
        name: chain.init({name: params[name]}) for name, chain in chains.items()
    }

  def update(updates, state, params):
    out, after = {}, {}
    for name, chain in chains.items():
      only = lambda tree, name=name: {name: tree[name]}
      moved, after[name] = chain.update(
          only(updates), state[name], only(params)
      )
      out |= moved
    return out, after

  return optax.GradientTransformation(init, update)
