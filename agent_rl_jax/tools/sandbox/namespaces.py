"""Private pid, network, IPC and mount namespaces for a server.

What bubblewrap would set up, done with `unshare` and `mount` once when a
server starts, so that calls pay nothing for it.  Leaves out the per-call
confinement (Landlock, seccomp, limits).  Invariant: after `enter_root` the
process sees Python's library, read only, and one small scratch file system.
"""

import ctypes
import os

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
  if result != 0:
    code = ctypes.get_errno()
    raise OSError(code, f'{what}: {os.strerror(code)}')


def _mount(source: str, target: str, kind: str, flags: int, data='') -> None:
  arguments = (source, target, kind)
  result = _LIBC.mount(
      *(ctypes.c_char_p(os.fsencode(a)) for a in arguments),
      ctypes.c_ulong(flags),
      ctypes.c_char_p(data.encode()),
  )
  _check(result, f'mount {target}')


def unshare() -> None:
  """Leaves the pid, network, IPC and host-name spaces that others share.

  The next fork is process 1 of the new pid space and takes it along when it
  dies.  The mount space follows in `enter_root`, so that the caller of this
  function, which cleans up, goes on seeing the machine's files.
  Without root a user namespace comes first, which maps this user to itself.

  Raises:
    OSError: The kernel or a policy forbids it.
  """
  uid, gid = os.geteuid(), os.getegid()
  flags = _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
  if uid != 0:
    flags |= _NEWUSER
  _check(_LIBC.unshare(ctypes.c_int(flags)), 'unshare')
  if uid != 0:
    for name, text in (
        ('setgroups', 'deny'),
        ('uid_map', f'{uid} {uid} 1'),
        ('gid_map', f'{gid} {gid} 1'),
    ):
      with open(f'/proc/self/{name}', 'w') as file:
        file.write(text)


def enter_root(
    base: str, read: list[str], hide: list[str], size: int, files: int
) -> str:
  """Makes `base` the root folder and returns the scratch folder's new path.

  Args:
    base: An empty folder; the new root is mounted over it.
    read: Folders to show under their own paths, read only.
    hide: Folders beneath them to cover with an empty one.
    size: Bytes that the scratch file system may hold.
    files: Files and folders that it may hold.

  Raises:
    OSError: A mount was refused.
  """
  quiet = _MS_NOSUID | _MS_NODEV
  _check(_LIBC.unshare(ctypes.c_int(_NEWNS)), 'unshare the mounts')
  _mount('none', '/', '', _MS_REC | _MS_PRIVATE)
  _mount('tmpfs', base, 'tmpfs', quiet | _MS_NOEXEC, 'mode=0755,size=1m')
  for path in read:
    target = base + path
    os.makedirs(target, exist_ok=True)
    _mount(path, target, '', _MS_BIND | _MS_REC)
    # A user namespace may add restrictions to a mount but not drop any.
    kept = os.statvfs(target).f_flag & _MS_NOEXEC
    remount = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet | kept
    _mount('none', target, '', remount)
  for path in hide:
    data = 'mode=0755,size=4k'
    _mount('tmpfs', base + path, 'tmpfs', quiet | _MS_RDONLY, data)
  scratch = base + '/scratch'
  os.mkdir(scratch)
  data = f'mode=0711,size={size},nr_inodes={files}'
  _mount('tmpfs', scratch, 'tmpfs', quiet | _MS_NOEXEC, data)
  os.mkdir(base + '/old')
  paths = (os.fsencode(base), os.fsencode(base + '/old'))
  os.chdir(base)
  _check(_pivot_root(*paths), 'pivot_root')
  os.chdir('/')
  _check(_LIBC.umount2(b'/old', _MNT_DETACH), 'umount the old root')
  os.rmdir('/old')
  remount = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet | _MS_NOEXEC
  _mount('none', '/', '', remount)
  return '/scratch'


def _pivot_root(new: bytes, old: bytes) -> int:
  number = {'x86_64': 155, 'aarch64': 41}[os.uname().machine]
  return _LIBC.syscall(ctypes.c_long(number), new, old)
