"""Tools that an agent may call, by name.

A new tool is one file with a class that satisfies `tools.tool.Tool`, and one
entry here.  Importing this package imports no tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any


def _calculator() -> Any:
  from agent_rl_jax.tools.calculator import Calculator

  return Calculator()


def _python(**options: Any) -> Any:
  from agent_rl_jax.tools.python_tool import PythonTool
  from agent_rl_jax.tools.sandbox import SandboxOptions, make_sandbox

  return PythonTool(make_sandbox(SandboxOptions(**options)))


TOOLS: Mapping[str, Callable[..., Any]] = {
    'calculator': _calculator,
    'python': _python,
}


def make_tool(name: str, **options: Any) -> Any:
  """Builds a tool; `options` are its own (of 'python': SandboxOptions).

  Raises:
    ValueError: The name is unknown; the nearest one is named.
  """
  if name not in TOOLS:
    near = difflib.get_close_matches(name, TOOLS, n=1)
    hint = f'did you mean {near[0]!r}?' if near else f'one of {sorted(TOOLS)}'
    raise ValueError(f'unknown tool {name!r}: {hint}')
  return TOOLS[name](**options)
