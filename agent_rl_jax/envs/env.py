"""The Env protocol: a world on the host that answers parsed actions.

What it leaves out: tokens (text/ turns messages into ids) and time limits (the
engine gives every step a deadline on an executor's thread).  Invariant: a step
returns a new state and leaves the old one as it was, so that one prefix can be
played on from twice; what an episode sees depends on task, seed and actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agent_rl_jax.types import Action, Observation, Task


@runtime_checkable
class Env(Protocol):
  """A host environment; its methods may be called from any thread."""

  @property
  def name(self) -> str:
    ...

  @property
  def tools(self) -> Sequence[Mapping[str, Any]]:
    """JSON-schema specs of what an agent may call, shown in the prompt."""
    ...

  def reset(self, task: Task, seed: int) -> tuple[Any, Observation]:
    """Opens an episode: the task fixes the world, the seed its chance."""
    ...

  def step(self, state: Any, action: Action) -> tuple[Any, Observation]:
    """Plays one action; `Observation.done` ends the episode."""
    ...

  def close(self, state: Any) -> None:
    """Frees what the episode holds; called once, when no step is running."""
    ...
