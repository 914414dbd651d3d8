"""A conversation with tools: calls are run, an answer ends the episode.

What it leaves out: judging the answer (rewards/) and limits on turns and tokens
(the engine).  Invariants: no more than `max_tool_calls` calls are run in an
episode, the agent is told when none is left and may still answer; whatever a
tool does, `step` returns an observation, and a call that could not be tried
at all raises, so that no agent is scored for it.

A turn that calls a tool is not final, even when it also holds an answer; a
turn without call, answer or error is final, without answer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.tools.tool import ERROR, Tool, unknown_tool
from agent_rl_jax.types import Action, Message, Observation, Task, ToolCall

_MAX_VIOLATIONS = 2  # calls in vain that end an episode: the second one does


class ToolsUnavailable(RuntimeError):
  """A tool call could not be tried; the episode says nothing of its agent."""


@dataclasses.dataclass(frozen=True)
class ToolEnvOptions:
  """Limits of an episode.

  Attributes:
    max_tool_calls: Calls that an episode may run; 0 allows none.
    tool_timeout: Seconds for the calls of one turn, queueing included.
    max_output_chars: Characters of one result that the agent sees.
    call_reward: Turn reward of the episode's first turn whose calls, as far as
      they were run, all succeed (MT-GRPO's tool execution reward, Zeng et al.
      2025, arXiv 2505.11821); once, so that calling on earns nothing more.
    call_limit_notice: Added to the last result when no call is left.
  """

  max_tool_calls: int = 4
  tool_timeout: float = 10.0
  max_output_chars: int = 2048
  call_reward: float = 0.0
  call_limit_notice: str = 'No tool calls are left. Give your final answer.'

  def __post_init__(self):
    if self.max_tool_calls < 0:
      raise ValueError(
          f'env max_tool_calls={self.max_tool_calls}: must be 0 or more'
      )
    if not self.tool_timeout > 0:
      raise ValueError(
          f'env tool_timeout={self.tool_timeout}: must be seconds above 0'
      )
    if self.max_output_chars < 1:
      raise ValueError(
          f'env max_output_chars={self.max_output_chars}: must be at least 1'
      )
    if not math.isfinite(self.call_reward):
      raise ValueError(f'env call_reward={self.call_reward}: must be finite')
    if not self.call_limit_notice.strip():
      raise ValueError(
          'env call_limit_notice is empty: the agent must be told that no '
          'tool call is left'
      )


@dataclasses.dataclass(frozen=True)
class ToolState:
  """Where an episode stands; counts only, never changed in place."""

  task: Task
  seed: int
  calls: int = 0  # run so far
  malformed: int = 0  # turns that could not be parsed
  violations: int = 0  # turns that called in vain: limit reached, or no tool
  succeeded: bool = False  # whether all calls of some turn did


class ToolEnv:
  """Runs an agent's tool calls through an executor."""

  Options = ToolEnvOptions
  name = 'tool'

  def __init__(
      self,
      tools: Mapping[str, Tool],
      executor: Executor | None = None,
      options: ToolEnvOptions | None = None,
  ):
    """Makes the environment; it holds no per-episode state.

    Args:
      tools: By name; empty for an agent that works by text alone.
      executor: Where calls run; may be the one that runs `step` itself.
      options: Limits.

    Raises:
      ValueError: A tool is filed under another name than its spec's, or
        there are tools and no executor.
    """
    for name, tool in tools.items():
      if tool.spec['name'] != name:
        raise ValueError(
            f'tool {name!r} calls itself {tool.spec["name"]!r}: the key must '
            'be the name in its spec'
        )
    if tools and executor is None:
      raise ValueError(
          f'env has tools ({", ".join(tools)}) but no executor to run them'
      )
    self._tools = dict(tools)
    self._executor = executor
    self._options = options or ToolEnvOptions()

  @property
  def tools(self) -> Sequence[Mapping[str, Any]]:
    """Specs of the tools, in the order they were given."""
    return tuple(tool.spec for tool in self._tools.values())

  def reset(self, task: Task, seed: int) -> tuple[ToolState, Observation]:
    """Opens an episode with the task's messages; nothing here is random."""
    return ToolState(task, seed), Observation(messages=task.messages)

  def step(
      self, state: ToolState, action: Action
  ) -> tuple[ToolState, Observation]:
    """Answers one action.

    Returns:
      The next state, and an observation with one message of role 'tool' per
      call (one in all for a turn that could not be parsed); `done` without
      messages on an answer, and at the second turn that calls in vain.
      `tool_results` holds the calls that were run, not the refused ones.

    Raises:
      ToolsUnavailable: A call could not be tried, by no fault of the agent.
    """
    if action.error is not None:
      state = dataclasses.replace(state, malformed=state.malformed + 1)
      return state, self._say(state, (ERROR + action.error,))
    if not action.tool_calls:
      return state, self._end(state)
    left = self._options.max_tool_calls - state.calls
    if not self._tools or left <= 0:
      return self._refuse(state, action.tool_calls)
    return self._run(state, action.tool_calls[:left], action.tool_calls[left:])

  def close(self, state: ToolState) -> None:
    """Nothing to free: the tools outlive the episode."""

  def _run(
      self,
      state: ToolState,
      calls: Sequence[ToolCall],
      excess: Sequence[ToolCall],
  ) -> tuple[ToolState, Observation]:
    """Runs `calls` and refuses `excess`, which is over the limit."""
    options = self._options
    results = self._executor.run_calls(
        self._tools,
        calls,
        time.monotonic() + options.tool_timeout,
        timeout=options.tool_timeout,
        max_output_chars=options.max_output_chars,
    )
    for call, result in zip(calls, results, strict=True):
      if result.infrastructure:
        raise ToolsUnavailable(f'tool {call.name}: {result.text}')
    succeeds = all(result.ok for result in results)
    reward = 0.0
    if succeeds and not state.succeeded:
      reward = options.call_reward
    state = dataclasses.replace(
        state,
        calls=state.calls + len(calls),
        succeeded=state.succeeded or succeeds,
    )
    texts = [result.text for result in results]
    texts += [f'{ERROR}not run.' for _ in excess]
    if state.calls >= options.max_tool_calls:
      texts[-1] = f'{texts[-1].rstrip()}\n{options.call_limit_notice}'
    return state, self._say(state, texts, results, reward)

  def _refuse(
      self, state: ToolState, calls: Sequence[ToolCall]
  ) -> tuple[ToolState, Observation]:
    """Runs nothing; patience ends at the second such turn."""
    state = dataclasses.replace(state, violations=state.violations + 1)
    if state.violations >= _MAX_VIOLATIONS:
      return state, self._end(state)
    if self._tools:
      reason = self._options.call_limit_notice
    else:
      reason = unknown_tool(calls[0].name, {})
    return state, self._say(state, (ERROR + reason,) * len(calls))

  def _say(self, state, texts, results=(), reward=0.0) -> Observation:
    messages: tuple[Message, ...] = tuple(
        {'role': 'tool', 'content': text} for text in texts
    )
    return Observation(
        messages=messages,
        reward=reward,
        tool_results=tuple(results),
        info=self._info(state),
    )

  def _end(self, state: ToolState) -> Observation:
    return Observation(done=True, info=self._info(state))

  def _info(self, state: ToolState) -> Mapping[str, int]:
    return {
        'tool_calls': state.calls,
        'malformed': state.malformed,
        'violations': state.violations,
    }
