"""A scored group: the unit that is kept, dropped, replayed and saved.

Leaves out how it came about.  Invariant: never changed once made, so that a
snapshot of what is kept is a tuple of references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from agent_rl_jax.algorithms.filters import TOLERANCE
from agent_rl_jax.types import Episode


@dataclasses.dataclass(frozen=True)
class Group:
  """The N episodes that one task was given.

  Attributes:
    episodes: With their reward components.
    returns: float32 [N], raw: before any shaping.
    metric: float32 [N], the unshaped measure.
    valid: bool [N], False where infrastructure or a reward failed.
    baseline: Shaped return of the group's greedy episode; None where none was
      played, or where it failed.
  """

  episodes: tuple[Episode, ...]
  returns: np.ndarray
  metric: np.ndarray
  valid: np.ndarray
  baseline: float | None = None

  @property
  def version(self) -> int:
    """Policy version that sampled it."""
    return self.episodes[0].policy_version

  @property
  def mixed(self) -> bool:
    """Whether the metric differs inside, as dynamic sampling judges it."""
    counted = self.metric[self.valid]
    return counted.size > 0 and bool(np.ptp(counted) > TOLERANCE)


def table(groups: Sequence[Group], name: str) -> np.ndarray:
  """float64 [G, N] of 'returns' or 'metric', NaN where it does not count."""
  return np.array(
      [np.where(group.valid, getattr(group, name), np.nan) for group in groups]
  )
