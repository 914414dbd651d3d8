"""Was every turn well formed?  Leaves out whether what it says is right."""

from __future__ import annotations

from agent_rl_jax.types import Episode, Task


def format_reward(task: Task, episode: Episode) -> float:
  """1.0 when each turn could be parsed and an answer was given, else 0.0."""
  del task
  if episode.answer is None:
    return 0.0
  return float(all(turn.action.error is None for turn in episode.turns))
