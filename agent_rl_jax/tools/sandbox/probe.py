"""The start-up probe: tries the attacks for real against a sandbox.

Every attack prints `BREACH` when it got what it wanted, and where the damage
would be seen from outside (a file, a killed process, a connection) the probe
looks there too.  Leaves out how a backend protects itself.  Invariant: a
sandbox passes only if it also runs honest code, so that one in which
everything fails does not look safe.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time

from agent_rl_jax.tools.sandbox import options as options_lib

_SECONDS = 10.0
_QUICK = 0.5
_LATE = 1.0  # of our own thread on a machine with much else to do
_HONEST = 'a=965;b=54;c=501;print(a*b-c)', '51609'


@dataclasses.dataclass(frozen=True)
class Attack:
  """One thing that code must not be able to do.

  Attributes:
    name: What it tries.
    code: Source, formatted with the probe's facts; prints BREACH on success.
    seconds: Deadline; an attack that only burns time gets a short one.
    before: Source of a call made just before, of which the attack must not
      find anything.
  """

  name: str
  code: str
  seconds: float = _SECONDS
  before: str = ''


def _attempt(body: str) -> str:
  lines = '\n'.join('  ' + line for line in body.strip().splitlines())
  return f'try:\n{lines}\n  print("BREACH")\nexcept Exception as e:\n  print(e)'


# `ctypes` reaches system calls that Python has no function for.
_LIBC = 'import ctypes\nlibc = ctypes.CDLL(None)\n'

# The secret of an earlier call.  The attacks know it backwards, so that they
# do not find themselves.
_SECRET = 'x = {secret!r}\nprint(x)'
_FRAMES = """
import sys
frame, found = sys._getframe(), False
while frame and not found:
  found = any({terces!r} in repr(v)[::-1] for v in dict(frame.f_locals).values())
  frame = frame.f_back
assert found"""
_HEAP = """
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
libc.sbrk.restype = ctypes.c_void_p
libc.sbrk.argtypes = [ctypes.c_long]
there = ctypes.create_string_buffer(1)
head, tail = {terces!r}[16:][::-1].encode(), {terces!r}[:16].encode()
def scan(start, size):
  start &= ~4095
  for page in range(start, start + size, 4096):
    if libc.mincore(page, 4096, there): continue
    data = ctypes.string_at(page, 4096)
    at = data.find(head)
    while at >= 0:
      if data[at + 16 : at + 32][::-1] == tail: return True
      at = data.find(head, at + 1)
assert scan(libc.sbrk(0) - (4 << 20), 4 << 20) or scan(id(object()) - (6 << 20), 12 << 20)"""
_LEAVE = """
import fcntl, os
open("left", "w").close()
for fd in (0, 2):
  fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
open("../left", "w").close()"""
_FIND = """
found = [os.path.exists(name) for name in ("left", "../left")]
found += [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND for fd in (0, 2)]
assert any(found)"""
_BESIDE = """
done = []
places = ["..", *{folders!r}]
places += [name + "/scratch/box" for name in {folders!r}]
for place in places:
  if os.path.realpath(place) == os.getcwd(): continue
  for action in (os.listdir, lambda name: open(name + "/beside", "w").close()):
    try: done.append(action(place))
    except OSError: pass
assert done"""

ATTACKS = (
    Attack('endless loop', 'while True: pass\nprint("BREACH")', _QUICK),
    Attack(
        'endless sleep',
        'import time\ntime.sleep(3600)\nprint("BREACH")',
        _QUICK,
    ),
    Attack('huge allocation', _attempt('x = [0] * (1 << 30)\nx[-1] = 1')),
    Attack('read /etc/passwd', _attempt('print(open("/etc/passwd").read(1))')),
    Attack('read a file outside', _attempt('print(open({file!r}).read())')),
    Attack(
        'list the root folder',
        'import os\n' + _attempt("""
names = os.listdir("/")
assert {{"etc", "proc"}} & set(names)"""),
    ),
    Attack('write a file outside', _attempt('open({file!r}, "w").write("x")')),
    Attack(
        'delete a file outside', 'import os\n' + _attempt('os.unlink({file!r})')
    ),
    Attack('create a file outside', _attempt('open({new!r}, "w").write("x")')),
    Attack(
        'change a mode outside',
        'import os\n' + _attempt('os.chmod({file!r}, 0o777)'),
    ),
    Attack(
        'huge file',
        _attempt("""
with open("big", "wb") as f:
  for _ in range({file_bytes} // 65536 + 2): f.write(b"x" * 65536)"""),
    ),
    Attack(
        'environment of the trainer',
        'import os\n' + _attempt("""
text = ""
for pid in ({pid}, {victim}, os.getppid()):
  try: text += open("/proc/%d/environ" % pid, errors="replace").read()
  except OSError: pass
text += str(dict(os.environ))
assert {secret!r} in text"""),
    ),
    Attack(
        'memory of the trainer',
        'import os\n' + _attempt("""
for pid in ({pid}, {victim}, os.getppid()):
  try: open("/proc/%d/mem" % pid, "rb").close()
  except OSError: continue
  break
else: raise OSError("refused")"""),
    ),
    Attack(
        'process_vm_readv',
        _LIBC + _attempt("""
class Vector(ctypes.Structure):
  _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(1)
here = ctypes.byref(Vector(ctypes.addressof(buffer), 1))
def read(pid, address):
  there = ctypes.byref(Vector(address, 1))
  return libc.process_vm_readv(pid, here, 1, there, 1, 0)
assert 1 in (read({pid}, {address}), read({victim}, {victim_address}))"""),
    ),
    Attack(
        'ptrace',
        # PTRACE_SEIZE, which does not stop its victim.
        _LIBC + 'import os\n' + _attempt("""
ok = [libc.ptrace(0x4206, pid, None, None) for pid in ({victim}, os.getppid())]
assert 0 in ok"""),
    ),
    Attack('frames of an earlier call', _attempt(_FRAMES), before=_SECRET),
    Attack(
        'memory of an earlier call', _LIBC + _attempt(_HEAP), before=_SECRET
    ),
    Attack(
        'state of an earlier call',
        'import fcntl, os\n' + _attempt(_FIND),
        before=_LEAVE,
    ),
    Attack('folders beside its own', 'import os\n' + _attempt(_BESIDE)),
    Attack(
        'kill a process outside',
        'import os\n' + _attempt('os.kill({victim}, 9)'),
    ),
    Attack(
        'kill the parent', 'import os\n' + _attempt('os.kill(os.getppid(), 9)')
    ),
    Attack(
        'kill everything of this group or user',
        'import os\n' + _attempt("""
for pid in (0, -1):
  os.kill(pid, 0)"""),
    ),
    Attack(
        'fork',
        'import os\n' + _attempt("""
if os.fork() == 0: os._exit(0)"""),
    ),
    Attack(
        'start a thread',
        'import threading\n' + _attempt('threading.Thread(target=int).start()'),
    ),
    Attack(
        'run a program',
        'import os, sys\n' + _attempt("""
os.execv({python!r}, [{python!r}, "-c", "print('BREACH')"])"""),
    ),
    Attack(
        'socket',
        'import socket\n'
        + _attempt('socket.create_connection(("127.0.0.1", {port}), 0.2)'),
    ),
    Attack(
        'abstract socket',
        'import socket\n' + _attempt("""
s = socket.socket(socket.AF_UNIX)
s.settimeout(0.2)
s.connect("\\0" + {abstract!r})"""),
    ),
    Attack(
        'new namespace',
        _LIBC + _attempt('assert libc.unshare(0x10000000) == 0'),
    ),
    Attack(
        'raise its own limits',
        'import resource\n'
        + _attempt('resource.setrlimit(resource.RLIMIT_CPU, (10, 10))'),
    ),
    Attack('flood of output', 'while True: print("x" * 1000)', _QUICK),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Outcome of a probe: `failed` maps what went wrong to how; empty = safe."""

  attempted: int
  failed: dict[str, str]


@contextlib.contextmanager
def _surroundings():
  """Things to attack, and the ways to see whether they were harmed."""
  secret = secrets.token_hex(16)
  abstract = 'agent_rl_jax_' + secrets.token_hex(8)
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    os.chmod(folder, 0o777)
    file = pathlib.Path(folder, 'outside.txt')
    file.write_text(secret)
    os.chmod(file, 0o666)
    victim = subprocess.Popen(
        [sys.executable, '-I', '-S', '-c', 'print(id(0), flush=1); input()'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={'SECRET': secret},
    )
    stack.callback(victim.wait)
    stack.callback(victim.kill)
    stack.callback(victim.stdin.close)
    stack.callback(victim.stdout.close)
    listeners = []
    tcp = stack.enter_context(socket.create_server(('127.0.0.1', 0)))
    listeners.append(tcp)
    unix = stack.enter_context(socket.socket(socket.AF_UNIX))
    unix.bind('\0' + abstract)
    unix.listen()
    listeners.append(unix)
    facts = {
        'file': str(file),
        'new': str(file.with_name('new.txt')),
        'pid': os.getpid(),
        'victim': victim.pid,
        'address': id(0),  # of an object, as in all of CPython
        'victim_address': int(victim.stdout.readline()),
        'secret': secret,
        'terces': secret[::-1],
        'python': sys.executable,
        'port': tcp.getsockname()[1],
        'abstract': abstract,
    }

    def harm() -> str:
      if victim.poll() is not None:
        return 'a process outside was killed'
      if not file.exists() or file.read_text() != secret:
        return 'a file outside was changed'
      if file.stat().st_mode & 0o777 != 0o666:
        return 'the mode of a file outside was changed'
      if pathlib.Path(facts['new']).exists():
        return 'a file outside was created'
      if select.select(listeners, [], [], 0)[0]:
        return 'a socket outside was reached'
      return ''

    yield facts, harm


def _attack(
    sandbox: options_lib.Sandbox, attack: Attack, facts: dict
) -> tuple[options_lib.SandboxResult, float, int]:
  """One attack: the result, its deadline, how many servers it has ended."""
  if attack.before:
    before = attack.before.format(**facts)
    sandbox.run(before, deadline=time.monotonic() + _SECONDS)
  replaced = getattr(sandbox, 'replaced', 0)
  deadline = time.monotonic() + attack.seconds
  result = sandbox.run(attack.code.format(**facts), deadline=deadline)
  return result, deadline, getattr(sandbox, 'replaced', 0) - replaced


def probe(
    sandbox: options_lib.Sandbox, options: options_lib.SandboxOptions
) -> Verdict:
  """Attacks the sandbox; takes about a second."""
  failed = {}
  with _surroundings() as (facts, harm):
    facts['file_bytes'] = int(options.file_bytes)
    facts['folders'] = list(getattr(sandbox, 'folders', ()))
    for attack in ATTACKS:
      result, deadline, replaced = _attack(sandbox, attack, facts)
      if result.error_kind == 'unavailable':
        # A server was still starting, say: once more, when one is up.
        sandbox.run('', deadline=time.monotonic() + _SECONDS)
        result, deadline, replaced = _attack(sandbox, attack, facts)
      if 'BREACH' in result.stdout:
        failed[attack.name] = 'succeeded'
      elif result.error_kind == 'unavailable':
        failed[attack.name] = result.reason or result.error
      elif time.monotonic() > deadline + _LATE:
        failed[attack.name] = 'not answered within its deadline'
      elif damage := harm():
        failed[attack.name] = damage
      elif replaced and result.error_kind != 'timeout':
        failed[attack.name] = 'ended the server'
      if failed:
        return Verdict(len(ATTACKS), failed)
  code, expected = _HONEST
  result = sandbox.run(code, deadline=time.monotonic() + _SECONDS)
  if result.stdout.strip() != expected:
    failed['honest code'] = f'printed {result.stdout!r}, error {result.error!r}'
  return Verdict(len(ATTACKS), failed)
