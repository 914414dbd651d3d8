"""Counters of a rollout, and the metrics that they become.

Leaves out what episodes are like; that is `train/metrics.py`.  Invariant:
whatever depends on timing is under `time/`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RolloutStats:
  """Counters of a rollout, or of several; seconds are wall-clock.

  Attributes:
    tokens: Tokens sampled.
    passes: Forward passes of decoding.
    busy: Rows that did useful work, summed over passes.
    prefills: Calls of `extend`.
    seconds: Duration of the rollout.
    exposed: Of which nothing ran on the device because tools did.
  """

  tokens: int = 0
  passes: int = 0
  busy: int = 0
  prefills: int = 0
  seconds: float = 0.0
  exposed: float = 0.0

  def __add__(self, other: RolloutStats) -> RolloutStats:
    mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
    return RolloutStats(**{key: mine[key] + theirs[key] for key in mine})

  def metrics(self, slots: int) -> dict[str, float]:
    """All of it depends on timing, hence the area `time`."""
    capacity = max(self.passes * slots, 1)
    return {
        'time/rollout_s': self.seconds,
        'time/exposed_tool_s': self.exposed,
        'time/slot_idle_fraction': 1.0 - self.busy / capacity,
        'time/decode_tokens_per_s': self.tokens / max(self.seconds, 1e-9),
    }
