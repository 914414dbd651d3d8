"""The Tool protocol, argument checks and the shape of an error result.

A tool is a JSON-schema spec and a callable.  This file leaves out threads,
deadlines and output limits (executor.py).  Invariant: whatever reaches a
tool's `__call__` through the executor satisfies the tool's own schema, and
every failure is a `ToolResult` whose text begins with 'error: '.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from agent_rl_jax.types import ToolResult

ERROR = 'error: '

_TYPES: Mapping[str, tuple[type, ...]] = {
    'string': (str,),
    'integer': (int,),
    'number': (int, float),
    'boolean': (bool,),
    'array': (list, tuple),
    'object': (Mapping,),
    'null': (type(None),),
}


@runtime_checkable
class Tool(Protocol):
  """What an agent may call: thread-safe, and it never raises.

  `spec` holds 'name', 'description' and 'parameters' (a JSON schema of type
  object).  `deadline` is in `time.monotonic()` seconds; a tool that can stop
  early should, for one that does not is abandoned together with its thread.
  """

  @property
  def spec(self) -> Mapping[str, Any]:
    ...

  def __call__(
      self, arguments: Mapping[str, Any], *, deadline: float
  ) -> ToolResult:
    ...


def ok_result(text: str) -> ToolResult:
  """A successful result; the executor fills in call id and seconds."""
  return ToolResult(call_id='', text=text, ok=True)


def error_result(
    message: str, call_id: str = '', infrastructure: bool = False
) -> ToolResult:
  """A failed result that the model reads as 'error: <message>'."""
  return ToolResult(
      call_id, ERROR + message, ok=False, infrastructure=infrastructure
  )


def unknown_tool(name: str, available: Mapping[str, Any]) -> str:
  """Message for a call of a tool that is not there."""
  if not available:
    return 'no tool is available; answer directly.'
  return f'unknown tool {name[:80]}; available: {", ".join(available)}'


def _type_of(value: Any) -> str:
  """JSON type name of a value, for messages."""
  for name in ('boolean', 'integer', 'number', 'string', 'array', 'object'):
    if isinstance(value, _TYPES[name]):
      return name
  return 'null' if value is None else type(value).__name__


def _has_type(value: Any, name: str) -> bool:
  """True when `value` is of the JSON type; a bool is not a number."""
  if isinstance(value, bool):
    return name == 'boolean'
  if name == 'integer' and isinstance(value, float):
    return value.is_integer()  # JSON does not tell 3 from 3.0
  return isinstance(value, _TYPES[name])


def _check(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
  """First thing wrong with `value` under `schema`, or None."""
  names = schema.get('type')
  if names is not None:
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in _TYPES]
    if unknown:
      raise ValueError(
          f'tool schema: type {unknown[0]!r} of {where} is none of '
          f'{", ".join(_TYPES)}'
      )
    if not any(_has_type(value, name) for name in names):
      return f'{where} must be {" or ".join(names)}, not {_type_of(value)}'
  if 'enum' in schema and value not in schema['enum']:
    allowed = ', '.join(repr(item) for item in schema['enum'])
    return f'{where} must be one of {allowed}'
  if isinstance(value, Mapping) and (
      'properties' in schema or 'required' in schema
  ):
    return _check_object(value, schema, where)
  if isinstance(value, list | tuple) and 'items' in schema:
    for i, item in enumerate(value):
      problem = _check(item, schema['items'], f'{where}[{i}]')
      if problem:
        return problem
  return None


def _check_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], where: str
) -> str | None:
  """Required keys, extra keys, then each property in schema order."""
  properties = schema.get('properties', {})
  prefix = f'{where}.' if where else ''
  if not schema.get('additionalProperties', False):
    for key in value:
      if key not in properties:
        near = difflib.get_close_matches(str(key), properties, n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        known = ', '.join(properties) or 'none'
        return (
            f'unknown argument {prefix}{str(key)[:80]}{hint} '
            f'(arguments: {known})'
        )
  for key in schema.get('required', ()):
    if key not in value:
      return f'missing argument {prefix}{key}'
  for key, child in properties.items():
    if key in value:
      problem = _check(value[key], child, f'{prefix}{key}')
      if problem:
        return problem
  return None


def validate_arguments(
    spec: Mapping[str, Any], arguments: Mapping[str, Any]
) -> str | None:
  """What is wrong with a call's arguments, worded for the model, or None.

  Understands type, enum, properties, required, additionalProperties (False
  unless the schema says otherwise: a misspelt key is an error, not silence)
  and items; other JSON-schema words are ignored.

  Args:
    spec: A tool's spec; its 'parameters' is the schema.
    arguments: The call's arguments.

  Raises:
    ValueError: The schema itself names a type that does not exist.
  """
  if not isinstance(arguments, Mapping):
    return f'arguments must be an object, not {_type_of(arguments)}'
  return _check_object(arguments, spec.get('parameters', {}), '')
