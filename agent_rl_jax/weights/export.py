"""Writes a policy as a Hugging Face folder: safetensors and config.json.

The tokenizer is the text room's; files given as `extra` are copied beside.
Invariant: the folder appears whole or not at all, and loading it back gives
the same bits.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.weights import families, names, safetensors

_DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}


def export(
    config: ModelConfig,
    params: Mapping[str, Any],
    folder: str | pathlib.Path,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    extra: Iterable[str | pathlib.Path] = (),
) -> pathlib.Path:
  """Writes `params` so that `load` and transformers read them.

  Args:
    config: Shape of the policy.
    params: Its tree, blocks stacked over layers; numpy or fully addressable
      jax arrays.
    folder: Where to; must not exist yet.
    dtype: 'float32' or 'bfloat16' of the files; None: `config.param_dtype`.
    shard_bytes: Largest size of one safetensors file.
    extra: Files to copy beside (tokenizer.json, chat_template.jinja, ...).

  Returns:
    The folder.

  Raises:
    FileExistsError: there is something at `folder` already.
    ValueError: a parameter has another shape than `config` says, or no family
      fits the config.
  """
  folder = pathlib.Path(folder)
  if folder.exists():
    raise FileExistsError(
        f'{folder} exists already; export to another folder or remove it'
    )
  dtype = dtype or config.param_dtype
  if dtype not in _DTYPES:
    raise ValueError(f'dtype={dtype!r}: one of {sorted(_DTYPES)}')
  raw = families.to_hf(config, dtype)
  _check(config, params)
  partial = folder.with_name(f'{folder.name}.partial-{os.getpid()}')
  partial.mkdir(parents=True)
  try:
    tensors = _tensors(config, params, _DTYPES[dtype])
    safetensors.write(partial, tensors, shard_bytes)
    for file in extra:
      shutil.copy(file, partial)
    text = json.dumps(raw, indent=2, sort_keys=True) + '\n'
    (partial / 'config.json').write_text(text)
    os.rename(partial, folder)
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return folder


def _check(config: ModelConfig, params: Mapping[str, Any]) -> None:
  for row in names.names(config):
    want = names.shape(config, row)
    want = (config.num_layers, *want) if row.stacked else want
    have = tuple(names.get(params, row.path).shape)
    if have != want:
      raise ValueError(
          f'parameter {row.path} has shape {have}, the config says {want}'
      )


def _tensors(
    config: ModelConfig, params: Mapping[str, Any], dtype: Any
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
  """(name, bytes, maker) of every tensor, made only when it is written."""

  def maker(row: names.Name, layer: int) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
      leaf = names.get(params, row.path)
      array = np.asarray(leaf[layer] if row.stacked else leaf)
      return names.to_checkpoint(row, array).astype(dtype)

    return make

  size = np.dtype(dtype).itemsize
  return [
      (name, math.prod(names.shape(config, row)) * size, maker(row, layer))
      for row in names.names(config)
      for layer, name in enumerate(
          names.checkpoint_names(config, row, names.HF)
      )
  ]
