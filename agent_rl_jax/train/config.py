"""Configuration files: key checks, splats into options, saving, comparing.

Works on any ml_collections config; what the sections mean and which
combinations are impossible is in `train/settings.py`.  Leaves out flags other
than the config's own.  Invariant: every mistake that can be seen without
compiling is reported here, with the full key and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ml_collections import config_dict

from agent_rl_jax.train import whole_file

T = TypeVar('T')

# Keys that may change between two runs of one folder without changing what
# the continuation computes.  A section names all of its keys.
FREE = (
    'run_dir',
    'report',
    'eval',
    'checkpoint',
    'rollout.workers',
    'tools.workers',
)


def flatten(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns {'section.key': leaf} of a nested config, in its own order."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, (Mapping, config_dict.ConfigDict)):
      flat.update(flatten(value, f'{prefix}{key}.'))
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def nearest(key: str, valid: Sequence[str]) -> str:
  """Returns the valid key that `key` most probably meant, '' if none is near.

  A key written in the wrong section is found by its last part.
  """
  match = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
  last = key.rpartition('.')[2]
  same = [other for other in valid if other.rpartition('.')[2] == last]
  if same and not (match and match[0].rpartition('.')[2] == last):
    return difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0]
  match = match or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
  return match[0] if match else ''


def _unknown(key: str, valid: Sequence[str]) -> str:
  hint = nearest(key, valid)
  end = f'; did you mean {hint!r}?' if hint else '; see configs/base.py'
  return f'unknown config key {key!r}{end}'


def check_keys(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
  """Raises ValueError when `config` has other keys than `base` lists."""
  have, want = flatten(config), flatten(base)
  errors = [_unknown(key, list(want)) for key in have if key not in want]
  errors += [
      f'config key {key!r} is missing; build the config from configs/base.py'
      for key in want
      if key not in have
  ]
  if errors:
    raise ValueError('\n'.join(errors))


def check_overrides(
    argv: Sequence[str], base: Mapping[str, Any], flag: str = 'config'
) -> None:
  """Raises ValueError when `--config.some.key` names no key of `base`.

  Called on the raw command line before absl parses it, whose own message
  knows the wrong part of the key only.
  """
  valid = list(flatten(base))
  pattern = re.compile(rf'--?(?:no)?{re.escape(flag)}\.([^=]+)')
  errors = []
  for argument in argv:
    if argument == '--':
      break
    match = pattern.match(argument)
    if match is None:
      continue
    key = re.sub(r'\[\d+\]$', '', match.group(1))
    if key not in valid:
      errors.append(_unknown(key, valid))
  if errors:
    raise ValueError('\n'.join(errors))


def section(config: Mapping[str, Any], options: type[T], **provided: Any) -> T:
  """Builds a room's options by keyword splat from a config section.

  Args:
    config: The section; a nested section fills a field that is itself a
      dataclass.
    options: A frozen dataclass.
    **provided: Fields that come from elsewhere (vocab_size from the
      tokenizer), not from the config.

  Returns:
    `options(**config, **provided)`, lists as tuples, ints where floats are
    meant as floats.

  Raises:
    ValueError: naming the key when a key is read by no field, a field is
      missing or a value has the wrong type, or what the options refuse.
  """
  hints = typing.get_type_hints(options)
  fields = {field.name: field for field in dataclasses.fields(options)}
  names = [name for name in fields if name not in provided]
  values = dict(provided)
  for key, value in config.items():
    if key not in names:
      hint = nearest(key, names)
      raise ValueError(
          f'config key {key!r} is not used by {options.__name__}'
          + (f'; did you mean {hint!r}?' if hint else '')
      )
    values[key] = _fit(f'{options.__name__}.{key}', value, hints[key])
  for name, field in fields.items():
    required = (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
    if required and name not in values:
      raise ValueError(
          f'{options.__name__} needs {name!r}, which the config does not give'
      )
  return options(**values)


def _fit(name: str, value: Any, hint: Any) -> Any:
  """Returns `value` as the annotation wants it, or raises ValueError."""
  if isinstance(value, (Mapping, config_dict.ConfigDict)):
    if dataclasses.is_dataclass(hint):
      return section(value, hint)
    return value.to_dict() if hasattr(value, 'to_dict') else dict(value)
  if isinstance(value, list):
    value = tuple(value)
  if typing.get_origin(hint) is tuple and not isinstance(value, tuple):
    raise ValueError(f'{name}={value!r} is no tuple; give ({value!r},)')
  allowed = (
      typing.get_args(hint)
      if typing.get_origin(hint) in (typing.Union, types.UnionType)
      else (hint,)
  )
  plain = [kind for kind in allowed if kind in (int, float, bool, str)]
  if not plain or (value is None and type(None) in allowed):
    return value
  if float in plain and isinstance(value, int) and not isinstance(value, bool):
    return value if int in plain else float(value)
  if type(value) in plain or len(plain) < len(
      [kind for kind in allowed if kind is not type(None)]
  ):
    return value
  wanted = ' or '.join(kind.__name__ for kind in plain)
  raise ValueError(
      f'{name}={value!r} is a {type(value).__name__}; give a {wanted}'
  )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `config` as JSON-like values: nested dicts, lists, scalars."""

  def convert(value: Any) -> Any:
    if isinstance(value, (Mapping, config_dict.ConfigDict)):
      return {key: convert(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
      return [convert(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
      return value
    raise ValueError(f'{value!r} in the config is no plain value')

  return convert(config)


def save(config: Mapping[str, Any], path: str | os.PathLike) -> None:
  """Writes the resolved config as JSON, atomically."""
  with whole_file.replacing(path) as partial:
    partial.write_text(json.dumps(plain(config), indent=2) + '\n', 'utf-8')


def load(
    path: str | os.PathLike, base: Mapping[str, Any]
) -> config_dict.ConfigDict:
  """Reads what `save` wrote into a config with the keys and types of `base`.

  Raises ValueError when a key of the file is unknown to `base`; a key that
  the file lacks (an older run) keeps its value from `base`.
  """
  saved = flatten(json.loads(pathlib.Path(path).read_text('utf-8')))
  try:
    return updated(base, saved)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def updated(
    base: Mapping[str, Any], flat: Mapping[str, Any]
) -> config_dict.ConfigDict:
  """A copy of `base`, locked, with the values of {'section.key': value}.

  Raises ValueError when a key is unknown to `base`.
  """
  config = config_dict.ConfigDict(
      base.to_dict() if hasattr(base, 'to_dict') else dict(base)
  )
  valid = flatten(config)
  for key, value in flat.items():
    if key not in valid:
      raise ValueError(_unknown(key, list(valid)))
    value = _tuples(value) if isinstance(value, list) else value
    *parents, last = key.split('.')
    node = config
    for parent in parents:
      node = node[parent]
    with node.ignore_type():
      node[last] = value
  config.lock()
  return config


def _tuples(value: Any) -> Any:
  if isinstance(value, list):
    return tuple(_tuples(item) for item in value)
  return value


def continuation(
    config: Mapping[str, Any], free: Sequence[str] = FREE
) -> dict[str, Any]:
  """Returns the flat keys that a checkpoint's continuation depends on."""
  return {
      key: value
      for key, value in flatten(plain(config)).items()
      if not any(key == name or key.startswith(name + '.') for name in free)
  }


def digest(config: Mapping[str, Any], free: Sequence[str] = FREE) -> str:
  """Returns a hex digest of the keys that the continuation depends on."""
  text = json.dumps(continuation(config, free), sort_keys=True)
  return hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]


def differences(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    free: Sequence[str] = FREE,
) -> list[str]:
  """Lists 'key: saved -> now' where two configs continue differently."""
  old, new = continuation(saved, free), continuation(config, free)
  return [
      f'{key}: {old.get(key)!r} -> {new.get(key)!r}'
      for key in sorted({*old, *new})
      if key not in old or key not in new or old[key] != new[key]
  ]


def claim(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    owner: str,
    free: Sequence[str] = FREE,
) -> str | None:
  """Writes config.json, unless the folder holds what another config began.

  Args:
    folder: Of a run.
    config: The run's config.
    owner: What the folder belongs to, in words: a run or a study.
    free: Keys that may differ, as `continuation` takes them.

  Returns:
    None, or what is in the way and how to mend it; then nothing is written.
  """
  path = folder / 'config.json'
  if path.exists():
    saved = json.loads(path.read_text(encoding='utf-8'))
    lines = differences(saved, config, free)
    if lines:
      return (
          f'{folder} belongs to a {owner} with another config:\n  '
          + '\n  '.join(lines)
          + '\nRestore these values, or choose another run_dir.'
      )
  save(config, path)
  return None
