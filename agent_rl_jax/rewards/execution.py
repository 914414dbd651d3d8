"""Did the tool calls work?  Leaves out whether they helped."""

from __future__ import annotations

from agent_rl_jax.types import Episode, Task


def execution(task: Task, episode: Episode) -> float:
  """Share of the episode's tool calls that succeeded; 0.0 without any."""
  del task
  results = [r for turn in episode.turns for r in turn.tool_results]
  return sum(r.ok for r in results) / len(results) if results else 0.0
