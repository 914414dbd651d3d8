"""A call's scratch folder, seen from outside: is it too full, empty it.

The folder's owner may have been hostile: deep nesting, odd names and closed
folders are expected.  Leaves out making it.  Invariant: nothing is followed
out of the folder, and depth costs neither recursion nor long names.
"""

import os
import secrets

MAX_FILES = 4096
_MAX_DEPTH = 32


def empty(folder: str) -> None:
  """Removes all that a call left, however deep it nested its folders.

  Folders are moved up to the top before they are emptied, so that the depth
  of the tree costs neither recursion nor long names.
  """
  queue = [folder]
  while queue:
    path = queue.pop()
    with os.scandir(path) as entries:
      found = [(e.path, e.is_dir(follow_symlinks=False)) for e in entries]
    for entry, is_folder in found:
      if not is_folder:
        os.unlink(entry)
        continue
      target = f'{folder}/{secrets.token_hex(8)}'
      os.chmod(entry, 0o700)
      os.rename(entry, target)
      queue.append(target)
    if path != folder:
      os.rmdir(path)


def within(folder: str, limit: int) -> bool:
  """Whether a folder holds no more than `limit` bytes and MAX_FILES entries.

  More than 32 levels of folders are too many as well: looking at them would
  take longer than the looker has.
  """
  size = count = 0
  stack = [(folder, 0)]
  while stack:
    path, depth = stack.pop()
    if depth > _MAX_DEPTH:
      return False
    try:
      with os.scandir(path) as entries:
        for entry in entries:
          count += 1
          if entry.is_dir(follow_symlinks=False):
            stack.append((entry.path, depth + 1))
          else:
            size += entry.stat(follow_symlinks=False).st_blocks * 512
          if size > limit or count > MAX_FILES:
            return False
    except OSError:
      continue  # removed, or closed to us, while we looked
  return True
