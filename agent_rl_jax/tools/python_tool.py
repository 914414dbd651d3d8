"""Python as a tool: the model writes code and reads what it printed.

Leaves out how the code is contained (sandbox/).  Invariant: the text depends
on what the code did and on the limits, not on how long it took.  What the
code prints may still differ from server to server: the address in the text of
an object, its process id, the path of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_rl_jax.tools.sandbox import Sandbox
from agent_rl_jax.tools.tool import error_result, ok_result
from agent_rl_jax.types import ToolResult

_NO_OUTPUT = '(no output; use print to see a value)'
_CUT = '\n[output cut]'


class PythonTool:
  """The tool 'python': one argument, the code; the answer is its output.

  After an error the answer is the last line of the traceback, behind the
  'error: ' that all tools put there.  Code that the sandbox could not try gets
  a result with `infrastructure` set.
  """

  def __init__(
      self, sandbox: Sandbox, name: str = 'python', max_chars: int = 2000
  ):
    """Wraps a sandbox, which `close` closes.

    Args:
      sandbox: Where the code runs.
      name: Name under which the model calls the tool.
      max_chars: Longest text that the model is shown.

    Raises:
      ValueError: `max_chars` leaves no room for a text.
    """
    if max_chars <= len(_CUT):
      raise ValueError(
          f'max_chars is {max_chars}: it must be above {len(_CUT)}'
      )
    self._sandbox = sandbox
    self._max_chars = max_chars
    self.spec: Mapping[str, Any] = {
        'name': name,
        'description': 'Runs Python code and returns what it prints.',
        'parameters': {
            'type': 'object',
            'properties': {
                'code': {
                    'type': 'string',
                    'description': 'For example print(12 * (3 + 4)).',
                }
            },
            'required': ['code'],
        },
    }

  @property
  def sandbox(self) -> Sandbox:
    """Where the code runs; its `why` names the protection."""
    return self._sandbox

  def __call__(
      self, arguments: Mapping[str, Any], *, deadline: float
  ) -> ToolResult:
    """Runs `arguments['code']` and answers by `deadline`."""
    result = self._sandbox.run(arguments['code'], deadline=deadline)
    if result.error_kind != 'none':
      return error_result(
          result.error[: self._max_chars],
          infrastructure=result.error_kind == 'unavailable',
      )
    text = result.stdout.removesuffix('\n')
    if result.truncated or len(text) > self._max_chars:
      text = text[: self._max_chars - len(_CUT)] + _CUT
    return ok_result(text or _NO_OUTPUT)

  def close(self) -> None:
    """Ends the sandbox."""
    self._sandbox.close()
