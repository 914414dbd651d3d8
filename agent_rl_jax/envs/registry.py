"""Host environments by name.

A new environment is one file with a class like `ToolEnv` (its `Options`, and a
constructor of tools, executor and options) and one entry here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from agent_rl_jax.envs.env import Env
from agent_rl_jax.envs.tool_env import ToolEnv
from agent_rl_jax.tools.executor import Executor
from agent_rl_jax.tools.tool import Tool

ENVS = {'tool': ToolEnv}


def make_env(
    name: str,
    *,
    tools: Mapping[str, Tool] | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Env:
  """Builds an environment from its config section.

  Args:
    name: A key of ENVS.
    tools: What the agent may call, by name.
    executor: Where the calls run.
    **options: Fields of the environment's options.

  Raises:
    ValueError: The name or an option is unknown (the nearest is named), or an
      option's value is out of range.
  """
  if name not in ENVS:
    raise ValueError(_unknown('env', name, ENVS))
  cls = ENVS[name]
  fields = [field.name for field in dataclasses.fields(cls.Options)]
  for key in options:
    if key not in fields:
      raise ValueError(_unknown(f'option of env {name!r}', key, fields))
  return cls(tools or {}, executor, cls.Options(**options))


def _unknown(kind: str, name: str, known) -> str:
  near = difflib.get_close_matches(name, list(known), n=1)
  hint = f'did you mean {near[0]!r}?' if near else f'one of {sorted(known)}'
  return f'unknown {kind} {name!r}: {hint}'
