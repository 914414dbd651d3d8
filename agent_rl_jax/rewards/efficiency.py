"""What an episode cost, as negative numbers to be weighted.

Plain costs, right or wrong; they leave out any bargain with the answer.
"""

from __future__ import annotations

from agent_rl_jax.types import Episode, Task


def call_cost(task: Task, episode: Episode) -> float:
  """Minus the number of tool calls that were run."""
  del task
  return -float(episode.num_tool_calls)


def length_cost(task: Task, episode: Episode) -> float:
  """Minus the number of sampled tokens, in thousands."""
  del task
  return -episode.num_action_tokens / 1000
