"""The config flag of the entry points.

Leaves out what a program does.  Invariant: a mistake in a key or a value ends
the program with its message alone, before JAX has touched a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import settings as settings_lib


def define_config(default: str | None = None, name: str = 'config') -> Any:
  """Defines `--config=FILE`, with `--config.some.key=value` beside it."""
  return config_flags.DEFINE_config_file(
      name, default, 'Config file; see configs/.', lock_config=True
  )


def run(
    main: Callable[[Sequence[str]], None],
    base: Mapping[str, Any],
    name: str = 'config',
) -> None:
  """Runs an absl main whose overrides are first checked against `base`."""

  def parse(argv: Sequence[str]) -> list[str]:
    try:
      config_lib.check_overrides(argv, base, name)
    except ValueError as error:
      fail(str(error))
    return flags.FLAGS(argv)

  # Libraries tell at the level of info which accelerators are not there.
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=parse)


def fail(message: str) -> None:
  """Ends the program with status 2 and a message, without a traceback."""
  print(f'{os.path.basename(sys.argv[0])}: {message}', file=sys.stderr)
  sys.exit(2)


def resolve(
    config: config_dict.ConfigDict | None, base: Mapping[str, Any]
) -> settings_lib.Settings:
  """`settings.resolve` for a program: errors are its last words."""
  if config is None:
    fail('give a config: --config=configs/NAME.py')
  try:
    return settings_lib.resolve(config, base)
  except (ValueError, TypeError) as error:
    fail(str(error))


def guard(work: Callable[[], Any]) -> Any:
  """Runs `work`; what a user can mend ends the program without a traceback.

  Such are a run folder or checkpoint of another run, a part that cannot be
  built, a file that is not there and a sandbox that does not hold; all else is
  a defect and keeps its traceback.
  """
  from agent_rl_jax.tools.sandbox import SandboxUnavailable
  from agent_rl_jax.train.checkpoint import CheckpointMismatch
  from agent_rl_jax.train.run import RunError

  try:
    return work()
  except (
      CheckpointMismatch,
      FileNotFoundError,
      RunError,
      SandboxUnavailable,
  ) as error:
    fail(str(error))
