"""What the environment itself gave.  Leaves out how it came to that.

Invariant: with weight w in the return, `returns` holds w times each turn's
reward, which is what `TrajectoryBatch.turn_rewards` says of it.
"""

from __future__ import annotations

from agent_rl_jax.types import Episode, Task


def environment(task: Task, episode: Episode) -> float:
  """Sum of the rewards that the environment gave to the episode's turns."""
  del task
  return float(sum(turn.reward for turn in episode.turns))
