"""Environment calls of running episodes, on an executor's threads.

Opens, steps and closes episodes and encodes what environments say.  Leaves
out what follows from an answer (`engine.py`).  Invariant: every state that an
environment gave is closed once, after the last thread that works on it has
left, however late that is and whatever became of the episode.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from agent_rl_jax.rollout.live import Live
from agent_rl_jax.types import Action, Observation

# Seconds that a rollout which ends early gives to the closing of its states.
_FAREWELL = 1.0


def episode_seed(seed: int, purpose: int, uid: int) -> int:
  """Seed of an episode's environment: named, not ordered."""
  name = f'{seed}/{purpose}/{uid}'.encode()
  digest = hashlib.blake2b(name, digest_size=8).digest()
  return int.from_bytes(digest, 'little') >> 1


class EnvCalls:
  """Calls in flight of one rollout."""

  def __init__(
      self,
      envs: Mapping[str, Any],
      chat: Any,
      executor: Any,
      timeout: float,
      seed: int,
      purpose: int,
  ):
    """Nothing is called yet.

    Args:
      envs: Environments by name.
      chat: A ChatFormat.
      executor: Threads and deadlines.
      timeout: Seconds a call may take.
      seed: The run's seed.
      purpose: Names the randomness, with the seed and the episode.
    """
    self._envs, self._chat, self._executor = envs, chat, executor
    self._timeout, self._seed, self._purpose = timeout, seed, purpose
    self._open: dict[Any, Live] = {}

  def __len__(self) -> int:
    return len(self._open)

  def reset(self, live: Live) -> None:
    """Starts `(observation, prompt ids)`."""
    self._submit(live, self._reset, live)

  def step(self, live: Live, action: Action) -> None:
    """Starts `(observation, its ids or None)`."""
    self._submit(live, self._step, live, action)

  def harvest(self) -> list[tuple[Live, Any]]:
    """Takes (episode, ticket) of every call that has finished or expired."""
    done = [ticket for ticket in self._open if ticket.done]
    return [(self._open.pop(ticket), ticket) for ticket in done]

  def any_done(self) -> bool:
    return any(ticket.done for ticket in self._open)

  def wait(self, timeout: float) -> None:
    """Blocks until a call is done, or for `timeout` seconds."""
    self._executor.wait_any(list(self._open), timeout=timeout)

  def close(self, live: Live) -> Any:
    """Closes the episode's state, if it has or will have one; the ticket."""
    return self._executor.after(live.ticket, self._close, live)

  def abandon(self, lives: list[Live]) -> None:
    """Closes states of episodes that go no further.

    Waits a moment for those that no thread is inside of: whoever ends a
    rollout early is about to close the executor.
    """
    free = [live.ticket.ended for live in lives]
    closing = [self.close(live) for live in lives]
    self._executor.wait_all(
        [ticket for ticket, now in zip(closing, free, strict=True) if now],
        timeout=_FAREWELL,
    )

  def _submit(self, live: Live, job: Callable, *args: Any) -> None:
    deadline = time.monotonic() + self._timeout
    live.ticket = self._executor.submit(job, *args, deadline=deadline)
    self._open[live.ticket] = live

  # On a thread.  The state is handed over by the episode and not as a result:
  # the result of a call that comes too late is dropped, its state must not be.

  def _reset(self, live: Live) -> tuple[Observation, np.ndarray]:
    env, request = self._envs[live.request.task.env], live.request
    seed = episode_seed(self._seed, self._purpose, request.uid)
    live.state, observation = env.reset(request.task, seed)
    if observation.ids is not None:
      return observation, np.asarray(observation.ids, np.int32)
    return observation, self._chat.prompt(observation.messages, env.tools)

  def _step(
      self, live: Live, action: Action
  ) -> tuple[Observation, np.ndarray | None]:
    env = self._envs[live.request.task.env]
    live.state, observation = env.step(live.state, action)
    if observation.ids is not None:
      return observation, np.asarray(observation.ids, np.int32)
    if observation.done:
      return observation, None
    last = int(live.tokens[live.length - 1])
    return observation, self._chat.observation(observation, last)

  def _close(self, live: Live) -> None:
    state, live.state = live.state, None
    if state is not None:
      self._envs[live.request.task.env].close(state)
