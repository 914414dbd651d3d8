"""One tool call from arguments to result, whatever the tool does.

Checks the arguments, runs the tool, cuts its text, words its failures.  What it
leaves out: threads and deadlines (executor.py, which runs `invoke` on a worker
and `collect` in the caller).  Invariant: `collect` returns a result for every
outcome, and its text is valid Unicode within the limit.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from agent_rl_jax.tools import tool as tool_lib
from agent_rl_jax.tools.ticket import Ticket
from agent_rl_jax.types import ToolResult

_MARK = '\n...[{} characters left out]...\n'


def invoke(
    tool: tool_lib.Tool,
    arguments: Mapping[str, Any],
    deadline: float,
    limit: int,
) -> ToolResult:
  """Validates, runs and clips one call on a worker thread."""
  problem = tool_lib.validate_arguments(tool.spec, arguments)
  if problem is not None:
    return tool_lib.error_result(problem)
  result = tool(arguments, deadline=deadline)
  if not isinstance(result, ToolResult) or not isinstance(result.text, str):
    raise TypeError(
        f'tool {tool.spec["name"]} returned {type(result).__name__}, '
        'not a ToolResult with text'
    )
  # Clipped here, so that no more than the limit outlives the tool's thread.
  return ToolResult('', clip(result.text, limit), bool(result.ok))


def collect(
    slot: ToolResult | Ticket, call_id: str, allowed: float, limit: int
) -> ToolResult:
  """The result of one call, whatever became of it."""
  if isinstance(slot, ToolResult):
    return ToolResult(call_id, clip(slot.text, limit), slot.ok)
  if slot.expired:
    text, ok = f'{tool_lib.ERROR}timed out after {allowed:.4g} s', False
  elif slot.error is not None:
    text, ok = tool_lib.ERROR + last_line(slot.error), False
  else:
    text, ok = slot.result.text, slot.result.ok
  return ToolResult(call_id, clip(text, limit), ok, slot.seconds)


def last_line(error: BaseException) -> str:
  """Last line of an exception as the interpreter would print it."""
  lines = ''.join(traceback.format_exception_only(error)).strip().splitlines()
  return lines[-1] if lines else type(error).__name__


def clip(text: str, limit: int) -> str:
  """At most `limit` characters of valid Unicode, the middle left out.

  Head and tail stay: a result's end (the last line of an error, the final
  number) matters as much as its beginning.  Only what is kept is copied.
  """
  if len(text) > limit:
    room = limit - len(_MARK.format(len(text)))
    if room < 2:
      text = text[:limit]
    else:
      tail = room // 2
      mark = _MARK.format(len(text) - room)
      text = text[: room - tail] + mark + text[len(text) - tail :]
  # A lone surrogate is a str that no tokenizer can encode.
  return text.encode('utf-8', 'replace').decode('utf-8')
