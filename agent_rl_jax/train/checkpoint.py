"""Checkpoints: the state of a run in Orbax, asynchronous and atomic.

A checkpoint is the train state (arrays, restorable onto any mesh), a JSON
host state and ragged files, the last two written by each process for itself.
Leaves out what the host state means.  Invariant: a step folder that has its
final name is whole; a process killed at any moment leaves the previous one
loadable, and what it was writing is ignored, and removed before the next save.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

State = TypeVar('State')

_HOST = 'host.json'


class CheckpointMismatch(ValueError):
  """A checkpoint that belongs to another configuration or another state."""


class _LocalFilesHandler(ocp.CheckpointHandler):
  """Files of this process, in a folder named after it."""

  def save(self, directory, args: _SaveFiles) -> None:
    folder = pathlib.Path(directory) / f'process_{jax.process_index()}'
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in args.files.items():
      (folder / name).write_bytes(content)

  def restore(self, directory, args: _RestoreFiles) -> dict[str, bytes]:
    folder = pathlib.Path(directory) / f'process_{jax.process_index()}'
    count = len(list(pathlib.Path(directory).glob('process_*')))
    if count != jax.process_count():
      raise CheckpointMismatch(
          f'{directory} was written by {count} processes and this run has'
          f' {jax.process_count()}; resume with as many'
      )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@ocp.args.register_with_handler(_LocalFilesHandler, for_save=True)
@dataclasses.dataclass
class _SaveFiles(ocp.args.CheckpointArgs):
  files: Mapping[str, bytes]


@ocp.args.register_with_handler(_LocalFilesHandler, for_restore=True)
@dataclasses.dataclass
class _RestoreFiles(ocp.args.CheckpointArgs):
  pass


def _flat(tree: Any) -> dict[str, Any]:
  """Leaves by path, so that a file names parameters and not tuple types."""
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  missing = object()
  lines = []
  for key in sorted({*saved, *now}):
    old, new = saved.get(key, missing), now.get(key, missing)
    if old != new:
      word = lambda value: 'absent' if value is missing else repr(value)
      lines.append(f'{key}: {word(old)} in the checkpoint, {word(new)} now')
  return lines


class Checkpoints:
  """The checkpoints of one run folder.

  Args:
    folder: Where they live; made if it is missing.
    keep: How many of the latest to keep.
    config: Flat, JSON-able mapping of what a continuation depends on; saved
      with each checkpoint and compared before anything is restored.  None
      neither saves nor compares.
    read_only: For readers beside a running writer: creates and cleans
      nothing.
  """

  def __init__(
      self,
      folder: str | pathlib.Path,
      keep: int = 2,
      config: Mapping[str, Any] | None = None,
      read_only: bool = False,
  ):
    if keep < 1:
      raise ValueError(f'keep={keep} checkpoints; keep at least 1.')
    self.folder = pathlib.Path(folder).absolute()
    # Through JSON once, so that tuples and lists compare as they are saved.
    self._config = None if config is None else json.loads(json.dumps(config))
    self._read_only = read_only
    # Orbax tells each phase of each save at the level of a warning or info.
    logging.getLogger('absl').addFilter(_quiet)
    if read_only and not self.folder.is_dir():
      raise FileNotFoundError(f'{self.folder} holds no checkpoints')
    self._manager = ocp.CheckpointManager(
        self.folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
        ),
        item_names=('state', 'local'),
        item_handlers={
            'state': ocp.PyTreeCheckpointHandler(),
            'local': _LocalFilesHandler(),
        },
    )

  def latest(self) -> int | None:
    """Step of the newest whole checkpoint, None when there is none."""
    if self._read_only:
      self._manager.reload()
    return self._manager.latest_step()

  def save(
      self,
      step: int,
      state: Any,
      host_state: Mapping[str, Any],
      files: Mapping[str, bytes] | None = None,
  ) -> bool:
    """Starts saving; returns as soon as the state may be donated again.

    Args:
      step: Name of the checkpoint; increases.
      state: Tree of arrays.
      host_state: JSON-able; copied before this returns.
      files: Ragged parts of this process, by plain file name.

    Returns:
      False when `step` is saved already (or being saved), else True.

    Raises:
      TypeError: when the host state is no JSON.
      Whatever an earlier asynchronous save failed with.
    """
    if step in self._manager.all_steps():
      return False
    host = json.dumps({'host_state': host_state, 'config': self._config})
    local = {_HOST: host.encode()}
    for name, content in (files or {}).items():
      if name == _HOST or pathlib.PurePath(name).name != name:
        raise ValueError(f'checkpoint file {name!r} must be a plain name')
      local[name] = bytes(content)
    return self._manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeSave(_flat(state)), local=_SaveFiles(local)
        ),
        force=True,
    )

  def restore(
      self, abstract_state: State, step: int | None = None
  ) -> tuple[State, Any] | None:
    """Loads a checkpoint, bit for bit as it was saved.

    Args:
      abstract_state: Tree of ShapeDtypeStruct.  Leaves with a sharding are
        restored onto it, whatever mesh they were saved from; others come
        back as ordinary arrays of the default device.
      step: Which; the latest by default.

    Returns:
      (state, host_state), or None when the folder holds no checkpoint.

    Raises:
      CheckpointMismatch: when it was written under another configuration, or
        holds another state, naming the keys that differ.
      FileNotFoundError: when `step` is given and absent.
    """
    step = self._step(step)
    if step is None:
      return None
    local = self._local(step)
    host = json.loads(local[_HOST])
    self._check_config(step, host['config'])
    want = _flat(abstract_state)
    self._check_state(step, want)
    restore_args = {
        key: ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        if leaf.sharding is None
        else ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
        for key, leaf in want.items()
    }
    restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeRestore(want, restore_args=restore_args)
        ),
    ).state
    leaves = [
        # A copy, since the buffer will be donated to the next train step.
        jnp.array(restored[key]) if leaf.sharding is None else restored[key]
        for key, leaf in want.items()
    ]
    treedef = jax.tree.structure(abstract_state)
    return jax.tree.unflatten(treedef, leaves), host['host_state']

  def host_state(self, step: int | None = None) -> Any:
    """The host state alone, without arrays; None without a checkpoint."""
    step = self._step(step)
    if step is None:
      return None
    return json.loads(self._local(step)[_HOST])['host_state']

  def files(self, step: int | None = None) -> dict[str, bytes]:
    """This process's files of a checkpoint; {} when there is none."""
    step = self._step(step)
    if step is None:
      return {}
    local = self._local(step)
    return {name: local[name] for name in local if name != _HOST}

  def wait(self) -> None:
    """Blocks until the save in progress is whole on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and releases Orbax's threads."""
    self._manager.close()

  def _step(self, step: int | None) -> int | None:
    self.wait()
    latest = self.latest()
    if step is None:
      return latest
    steps = list(self._manager.all_steps())
    if step not in steps:
      raise FileNotFoundError(
          f'{self.folder} has no checkpoint {step}; it has {sorted(steps)}'
      )
    return step

  def _local(self, step: int) -> dict[str, bytes]:
    return self._manager.restore(
        step, args=ocp.args.Composite(local=_RestoreFiles())
    ).local

  def _check_config(self, step: int, saved: Mapping[str, Any] | None) -> None:
    if saved is None or self._config is None:
      return
    lines = _differing(saved, self._config)
    if lines:
      raise CheckpointMismatch(
          f'checkpoint {self.folder / str(step)} belongs to another'
          ' configuration:\n  '
          + '\n  '.join(lines)
          + '\nRestore these values, or choose another run folder.'
      )

  def _check_state(self, step: int, want: Mapping[str, Any]) -> None:
    tree = self._manager.item_metadata(step)['state'].tree
    form = lambda leaf: f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
    lines = _differing(
        {key: form(leaf) for key, leaf in tree.items()},
        {key: form(leaf) for key, leaf in want.items()},
    )
    if lines:
      raise CheckpointMismatch(
          f'checkpoint {self.folder / str(step)} holds another state:\n  '
          + '\n  '.join(lines[:8])
          + ('\n  ...' if len(lines) > 8 else '')
      )


def _quiet(record: logging.LogRecord) -> bool:
  """Drops Orbax's own chatter below an error; other absl logging passes."""
  return 'orbax' not in record.pathname or record.levelno >= logging.ERROR
