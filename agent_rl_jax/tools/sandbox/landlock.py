"""Landlock: an unprivileged process confines its own view of the files.

Three raw system calls through ctypes.  Leaves out what Landlock cannot refuse
(reading a file's metadata, changing its mode or its times): the seccomp list
has no call for the latter.  Invariant: after `restrict` only the given paths
can be opened, and from ABI 6 on no process outside can be signalled.
"""

import ctypes
import os
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_VERSION = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_RULE_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_FILE_RIGHTS = (1 << 13) - 1
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_READ = _READ_FILE | _READ_DIR
_READ_WRITE = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _REFER
    | _TRUNCATE
)


def _syscall(number: int, *arguments) -> int:
  result = _LIBC.syscall(ctypes.c_long(number), *arguments)
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f'landlock ({os.strerror(code)})')
  return result


def abi() -> int:
  """Version of the kernel's Landlock, 0 when it has none."""
  try:
    return _syscall(
        _CREATE_RULESET,
        None,
        ctypes.c_size_t(0),
        ctypes.c_uint32(_CREATE_VERSION),
    )
  except OSError:
    return 0


def _handled(version: int) -> tuple[int, int, int]:
  """Everything that this version can refuse: (files, network, scopes)."""
  files = _FIRST_FILE_RIGHTS
  files |= _REFER if version >= 2 else 0
  files |= _TRUNCATE if version >= 3 else 0
  files |= _IOCTL_DEV if version >= 5 else 0
  network = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
  scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
  return files, network, scopes


def ruleset(read: list[str], list_only: list[str], write: list[str]) -> int:
  """Makes a rule set and returns its descriptor.

  Args:
    read: Files and folders to read, all that is beneath included.
    list_only: Folders whose entries may be listed, at any depth, not read.
    write: Folders to read, write, create and delete in.

  Raises:
    OSError: The kernel has no Landlock, or a path does not exist.
  """
  version = abi()
  files, network, scopes = _handled(version)
  # Older kernels know a shorter structure and refuse a longer one.
  size = 8 if version < 4 else 16 if version < 6 else 24
  attributes = struct.pack('=QQQ', files, network, scopes)[:size]
  descriptor = _syscall(
      _CREATE_RULESET,
      ctypes.c_char_p(attributes),
      ctypes.c_size_t(size),
      ctypes.c_uint32(0),
  )
  rules = [(path, _READ) for path in read]
  rules += [(path, _READ_DIR) for path in list_only]
  rules += [(path, _READ_WRITE) for path in write]
  for path, rights in rules:
    _allow(descriptor, path, rights & files)
  return descriptor


def _allow(descriptor: int, path: str, rights: int) -> None:
  target = os.open(path, os.O_PATH | os.O_CLOEXEC)
  try:
    if not os.path.isdir(path):
      rights &= _READ_FILE  # rights over folders are an error on a file
    rule = struct.pack('=Qi', rights, target)
    _syscall(
        _ADD_RULE,
        ctypes.c_int(descriptor),
        ctypes.c_int(_RULE_PATH_BENEATH),
        ctypes.c_char_p(rule),
        ctypes.c_uint32(0),
    )
  finally:
    os.close(target)


def restrict(descriptor: int) -> None:
  """Confines the calling process to a rule set, for good.

  Raises:
    OSError: The kernel refused it.
  """
  _syscall(_RESTRICT_SELF, ctypes.c_int(descriptor), ctypes.c_uint32(0))
