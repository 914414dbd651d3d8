"""Files that are whole or absent, whenever the process ends.

Leaves out what is written.  Invariant: a file under its final name was written
to the end.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Gives a name beside `path` to write to; it becomes `path` at the end.

  The folder is made.  A body that raises leaves `path` as it was.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  yield partial
  os.replace(partial, path)
