"""A seccomp allow-list for one sandboxed Python process, assembled by hand.

Classic BPF, loaded with `prctl`; needs no library.  An allow-list, so that a
system call that a future kernel adds is refused until somebody reads about it.
Leaves out file names, which BPF cannot see: which files may be opened is the
affair of Landlock and of the mount namespace.  Invariant: what is not listed
answers EPERM (ENOSYS where libc then falls back to an older call), a foreign
architecture's call kills the process, and signals reach the caller alone.
"""

import ctypes
import errno
import functools
import platform
import struct

_AUDIT_ARCH = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_COLUMN = {'x86_64': 0, 'aarch64': 1}
_X32_BIT = 0x40000000
_ANY_PID = 0x5A5A5A5A  # beyond any process id, and in no instruction

# struct seccomp_data: nr, arch, instruction pointer, then six 64-bit arguments.
_NR, _ARCH, _ARGS = 0, 4, 16
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_AT_LEAST = 0x15, 0x35
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000 | errno.EPERM
_MISSING = 0x00050000 | errno.ENOSYS

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS = 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]

# (x86_64, aarch64); None where the architecture has no such call.
_ALLOWED = {
    'read': (0, 63),
    'write': (1, 64),
    'close': (3, 57),
    'mmap': (9, 222),
    'munmap': (11, 215),
    'mprotect': (10, 226),
    'brk': (12, 214),
    'lseek': (8, 62),
    'fstat': (5, 80),
    'newfstatat': (262, 79),
    'stat': (4, None),
    'lstat': (6, None),
    'statx': (332, 291),
    'futex': (202, 98),
    'getrandom': (318, 278),
    'rt_sigaction': (13, 134),
    'rt_sigprocmask': (14, 135),
    'rt_sigreturn': (15, 139),
    'rt_sigpending': (127, 136),
    'rt_sigtimedwait': (128, 137),
    'rt_sigsuspend': (130, 133),
    'sigaltstack': (131, 132),
    'pause': (34, None),
    'exit': (60, 93),
    'exit_group': (231, 94),
    'clock_gettime': (228, 113),
    'clock_getres': (229, 114),
    'clock_nanosleep': (230, 115),
    'nanosleep': (35, 101),
    'gettimeofday': (96, 169),
    'time': (201, None),
    'times': (100, 153),
    'alarm': (37, None),
    'getitimer': (36, 102),
    'setitimer': (38, 103),
    'mremap': (25, 216),
    'madvise': (28, 233),
    'msync': (26, 227),
    'mincore': (27, 232),
    'readv': (19, 65),
    'writev': (20, 66),
    'pread64': (17, 67),
    'pwrite64': (18, 68),
    'preadv': (295, 69),
    'pwritev': (296, 70),
    'sendfile': (40, 71),
    'copy_file_range': (326, 285),
    'ftruncate': (77, 46),
    'fadvise64': (221, 223),
    'fsync': (74, 82),
    'fdatasync': (75, 83),
    'access': (21, None),
    'faccessat': (269, 48),
    'faccessat2': (439, 439),
    'readlink': (89, None),
    'readlinkat': (267, 78),
    'getdents64': (217, 61),
    'getcwd': (79, 17),
    'chdir': (80, 49),
    'fchdir': (81, 50),
    'mkdir': (83, None),
    'mkdirat': (258, 34),
    'rmdir': (84, None),
    'unlink': (87, None),
    'unlinkat': (263, 35),
    'rename': (82, None),
    'renameat': (264, 38),
    'renameat2': (316, 276),
    'umask': (95, 166),
    'statfs': (137, 43),
    'fstatfs': (138, 44),
    'dup': (32, 23),
    'dup2': (33, None),
    'dup3': (292, 24),
    'pipe': (22, None),
    'pipe2': (293, 59),
    'eventfd2': (290, 19),
    'poll': (7, None),
    'ppoll': (271, 73),
    'select': (23, None),
    'pselect6': (270, 72),
    'epoll_create1': (291, 20),
    'epoll_ctl': (233, 21),
    'epoll_wait': (232, None),
    'epoll_pwait': (281, 22),
    'close_range': (436, 436),
    'getpid': (39, 172),
    'getppid': (110, 173),
    'gettid': (186, 178),
    'getuid': (102, 174),
    'geteuid': (107, 175),
    'getgid': (104, 176),
    'getegid': (108, 177),
    'getresuid': (118, 148),
    'getresgid': (120, 150),
    'getgroups': (115, 158),
    'getpgid': (121, 155),
    'getpgrp': (111, None),
    'getsid': (124, 156),
    'getrlimit': (97, 163),
    'getrusage': (98, 165),
    'uname': (63, 160),
    'sysinfo': (99, 179),
    'getcpu': (309, 168),
    'sched_yield': (24, 124),
    'sched_getaffinity': (204, 123),
    'set_robust_list': (273, 99),
    'get_robust_list': (274, 100),
    'rseq': (334, 293),
}

# Calls that libc or Python tries first and replaces when they are missing.
_FALL_BACK = {'clone3': (435, 435), 'openat2': (437, 437)}

# Calls whose arguments decide.
_SIGNALS = {'kill': (62, 129), 'tkill': (200, 130), 'tgkill': (234, 131)}
_OPENS = {'open': (2, None), 'openat': (257, 56)}
_FCNTL, _IOCTL, _PRLIMIT = (72, 25), (16, 29), (302, 261)
# F_DUPFD, F_[GS]ETFD, F_[GS]ETFL, F_GETLK, F_SETLK(W), F_DUPFD_CLOEXEC and
# F_GETPIPE_SZ.  F_SETOWN is left out: it makes the kernel signal others.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX.
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450)
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000


class _Program(ctypes.Structure):
  _fields_ = [('length', ctypes.c_ushort), ('code', ctypes.c_void_p)]


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
  return struct.pack('=HBBI', code, jump_true, jump_false, k)


def _argument(index: int, high: bool = False) -> bytes:
  """Loads one half of an argument (both architectures are little-endian)."""
  return _op(_LOAD, _ARGS + 8 * index + 4 * high)


def _block(number: int, body: list[bytes]) -> list[bytes]:
  """Runs `body`, which must return, when the call's number is `number`."""
  return [_op(_JUMP_EQUAL, number, 0, len(body)), *body]


def _one_of(index: int, values: tuple[int, ...]) -> list[bytes]:
  """Allows the call when the low half of an argument is one of `values`."""
  tests = [
      _op(_JUMP_EQUAL, value, len(values) - i) for i, value in enumerate(values)
  ]
  return [
      _argument(index),
      *tests,
      _op(_RETURN, _REFUSE),
      _op(_RETURN, _ALLOW),
  ]


def _null(index: int) -> list[bytes]:
  """Allows the call when a pointer argument is NULL."""
  return [
      _argument(index),
      _op(_JUMP_EQUAL, 0, 0, 3),
      _argument(index, high=True),
      _op(_JUMP_EQUAL, 0, 0, 1),
      _op(_RETURN, _ALLOW),
      _op(_RETURN, _REFUSE),
  ]


def _no_blind_truncation(index: int) -> list[bytes]:
  """Refuses O_RDONLY|O_TRUNC, which Landlock before ABI 3 lets through."""
  return [
      _argument(index),
      _op(_AND, _O_ACCMODE | _O_TRUNC),
      _op(_JUMP_EQUAL, _O_TRUNC, 0, 1),
      _op(_RETURN, _REFUSE),
      _op(_RETURN, _ALLOW),
  ]


def unsupported() -> str:
  """Why filters cannot be used on this machine; empty when they can."""
  machine = platform.machine()
  if machine not in _AUDIT_ARCH:
    known = ', '.join(sorted(_AUDIT_ARCH))
    return f'no system call table for {machine} (known: {known})'
  if ctypes.sizeof(ctypes.c_void_p) != 8:
    return 'the interpreter is a 32-bit program'
  # A filter at address 0 is a fault (EFAULT) where filters are built in.
  _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, 0, 0, 0)
  if ctypes.get_errno() != errno.EFAULT:
    return 'the kernel has no seccomp filters'
  return ''


def assemble(pid: int, machine: str | None = None) -> bytes:
  """The filter for the process `pid`, as the kernel's 8-byte instructions.

  Args:
    pid: The only process that the code may signal: itself, as it sees itself.
    machine: Architecture name as `platform.machine` spells it; None for ours.

  Raises:
    ValueError: There is no system call table for the machine.
  """
  machine = machine or platform.machine()
  if machine not in _AUDIT_ARCH:
    raise ValueError(
        f'no system call table for machine {machine!r}; known are'
        f' {sorted(_AUDIT_ARCH)}: use the monty backend'
    )
  column = _COLUMN[machine]
  code = [
      _op(_LOAD, _ARCH),
      _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1),
      _op(_RETURN, _KILL_PROCESS),
      _op(_LOAD, _NR),
  ]
  if machine == 'x86_64':
    code += [
        _op(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _op(_RETURN, _KILL_PROCESS),
    ]
  for numbers in _SIGNALS.values():
    code += _block(numbers[column], _one_of(0, (pid,)))
  for name, numbers in _OPENS.items():
    if numbers[column] is not None:
      index = 1 if name == 'open' else 2
      code += _block(numbers[column], _no_blind_truncation(index))
  code += _block(_FCNTL[column], _one_of(1, _FCNTL_COMMANDS))
  code += _block(_IOCTL[column], _one_of(1, _IOCTL_REQUESTS))
  code += _block(_PRLIMIT[column], _null(2))
  for numbers in _FALL_BACK.values():
    code += _block(numbers[column], [_op(_RETURN, _MISSING)])
  allowed = [
      numbers[column]
      for numbers in _ALLOWED.values()
      if numbers[column] is not None
  ]
  code += [
      _op(_JUMP_EQUAL, number, len(allowed) - i)
      for i, number in enumerate(allowed)
  ]
  code += [_op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
  return b''.join(code)


@functools.cache
def _template() -> bytes:
  return assemble(_ANY_PID)


def for_process(pid: int) -> bytes:
  """`assemble(pid)` for this machine, put together once and then filled in."""
  return _template().replace(
      struct.pack('=I', _ANY_PID), struct.pack('=I', pid)
  )


def set_no_new_privileges() -> None:
  """Gives up every way to gain privileges; filters and Landlock need it."""
  if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), 'prctl(PR_SET_NO_NEW_PRIVS)')


def install(code: bytes) -> None:
  """Loads a filter into the calling process, for good.

  Raises:
    OSError: The kernel refused it.
  """
  buffer = ctypes.create_string_buffer(code, len(code))
  program = _Program(len(code) // 8, ctypes.addressof(buffer))
  address = ctypes.addressof(program)
  if _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, address, 0, 0):
    raise OSError(ctypes.get_errno(), 'prctl(PR_SET_SECCOMP)')
