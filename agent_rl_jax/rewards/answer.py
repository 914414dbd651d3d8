"""Is the final answer right?

Leaves out finding the answer in a turn (text/ does that) and how well it was
written (format.py).  Invariant: 1.0 or 0.0, and 0.0 without an answer.
"""

from __future__ import annotations

from agent_rl_jax.rewards.numbers import normalize, parse_number, same_number
from agent_rl_jax.types import Episode, Task


def same_answer(given: str, gold: str | int | float) -> bool:
  """Equal as numbers; as normalized text when the gold answer is none."""
  expected = parse_number(gold)
  if expected is None:
    return normalize(given).casefold() == normalize(str(gold)).casefold()
  found = parse_number(given)
  return found is not None and same_number(found, expected)


def answer(task: Task, episode: Episode) -> float:
  """1.0 when the episode's last answer equals `task.payload['answer']`.

  Raises:
    KeyError: The task has no gold answer.
  """
  if 'answer' not in task.payload:
    raise KeyError(
        f"task {task.uid} has no payload['answer']; it has "
        f'{sorted(task.payload)}'
    )
  if episode.answer is None:
    return 0.0
  return float(same_answer(episode.answer, task.payload['answer']))
