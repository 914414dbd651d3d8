"""Hostile code against every backend: processes, memory, the result.

Contained, on time, and the next call works; see hostile.py.
"""

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.failures.hostile import SECONDS, expect, run


@pytest.mark.parametrize(
    'attempt',
    [
        'while True: os.fork()',
        'subprocess.run(["/bin/true"])',
        'os.system("true") == 0 or 1 / 0',
        'os.execv(sys.executable, ["python"])',
        'os.posix_spawn("/bin/true", ["true"], {})',
        'while True: threading.Thread(target=time.sleep, args=(9,)).start()',
        'multiprocessing.Process(target=int).start()',
    ],
)
def test_no_other_process_can_be_started(sandbox, attempt):
  names = 'os, sys, subprocess, threading, time, multiprocessing'
  result = run(sandbox, f'import {names}\n{attempt}\nprint("BREACH")')
  assert result.error_kind == 'exception', result


_RAW = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
  result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
  return result if result >= 0 else -ctypes.get_errno()
"""


@pytest.mark.skipif(os.uname().machine != 'x86_64', reason='x86-64 numbers')
def test_raw_system_calls_are_refused(cpython):
  numbers = {
      'socket': (41, 2, 1, 0),
      'socketpair': (53, 1, 1, 0),
      'fork': (57,),
      'vfork': (58,),
      'clone': (56, 17, 0, 0, 0, 0),
      'clone3': (435, 0, 0),
      'execveat': (322, 0, 0, 0, 0, 0),
      'ptrace': (101, 0, 0, 0, 0),
      'mount': (165, 0, 0, 0, 0, 0),
      'unshare': (272, 0x10000000),
      'bpf': (321, 0, 0, 0),
      'io_uring_setup': (425, 1, 0),
      'userfaultfd': (323, 0),
      'perf_event_open': (298, 0, 0, 0, 0, 0),
      'keyctl': (250, 0, 0),
      'pidfd_open': (434, os.getpid(), 0),
      'pidfd_getfd': (438, 0, 0, 0),
      'memfd_create': (319, 0, 0),
      'prctl': (157, 4, 1, 0, 0, 0),
      'seccomp': (317, 0, 0, 0),
      'setns': (308, 0, 0),
      'chroot': (161, 0),
      'personality': (135, 0),
      'rt_sigqueueinfo': (129, 1, 9, 0),
      'tgkill': (234, os.getpid(), os.getpid(), 9),
      'tkill': (200, os.getppid(), 9),
      'prlimit64': (302, os.getpid(), 0, 1, 0),
      'f_setown': (72, 0, 8, os.getpid()),
      'tiocsti': (16, 0, 0x5412, 0),
      'open_by_handle_at': (304, 0, 0, 0),
  }
  code = _RAW + f'print([call(*n) for n in {list(numbers.values())!r}])'
  result = expect(cpython, code, 'none')
  errors = dict(zip(numbers, eval(result.stdout), strict=True))
  assert errors.pop('clone3') == -38
  assert set(errors.values()) == {-1}, errors


@pytest.mark.skipif(os.uname().machine != 'x86_64', reason='x86-64 code')
def test_foreign_system_calls_kill_the_process(cpython):
  # x32 getpid, then the 32-bit entry: mov eax, 20; int 0x80; ret.
  code = _RAW + 'print("BREACH", call(0x40000000 + 39))'
  result = expect(cpython, code, 'crashed')
  assert 'SIGSYS' in result.error
  code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex("b814000000cd80c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("BREACH", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
  result = expect(cpython, code, 'crashed')
  assert re.search('SIGSYS|SIGSEGV', result.error)  # no 32-bit entry at all


def test_no_socket_can_be_opened(sandbox):
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    code = f"""
import socket
socket.create_connection(("127.0.0.1", {port}), 0.2)
print("BREACH")
"""
    assert run(sandbox, code).error_kind == 'exception'
    server.settimeout(0)
    with pytest.raises(BlockingIOError):
      server.accept()


def test_environment_and_memory_of_others_are_out_of_reach(cpython):
  secret = 'BREACH-' + secrets.token_hex(8)
  victim = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', 'input()'],
      stdin=subprocess.PIPE,
      env={'SECRET': secret},
  )
  try:
    code = f"""
import os
print(dict(os.environ))
for pid in [{os.getpid()}, {victim.pid}, os.getppid(), *{cpython.pids}, "self"]:
  for name in ("environ", "mem", "maps", "cmdline", "root/etc/passwd", "fd/0"):
    if (pid, name) == ("self", "fd/0"): continue  # a pipe of its own
    try: print("BREACH", pid, name, open(f"/proc/{{pid}}/{{name}}", "rb"))
    except OSError: pass
"""
    result = expect(cpython, code, 'none')
    assert result.stdout == '{}\n'
  finally:
    victim.communicate(b'\n')


def test_no_other_process_can_be_signalled(sandbox):
  victim = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', 'input()'], stdin=subprocess.PIPE
  )
  answers = []

  def sibling():
    code = 'import time\ntime.sleep(0.4)\nprint("alive")'
    answers.append(sandbox.run(code, deadline=time.monotonic() + SECONDS))

  thread = threading.Thread(target=sibling)
  thread.start()
  time.sleep(0.2)
  pids = [0, -1, 1, victim.pid, os.getpid(), *getattr(sandbox, 'pids', [])]
  code = f"""
import os
me = os.getpid()
for pid in {pids} + [os.getppid()] + list(range(me - 100, me + 100)):
  if pid == me: continue
  try:
    os.kill(pid, 9)
    print("BREACH", pid)
  except OSError: pass
print("done")
"""
  result = run(sandbox, code)
  thread.join()
  assert victim.poll() is None
  victim.communicate(b'\n')
  assert answers[0].stdout == 'alive\n'
  assert result.stdout == 'done\n' or result.error_kind == 'exception'


def test_limits_cannot_be_raised_nor_dodged(cpython):
  code = """
import resource, signal
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
  try:
    resource.setrlimit(kind, (1 << 40, 1 << 40))
    print("BREACH")
  except (OSError, ValueError): pass
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
for s in range(1, 64):
  try: signal.signal(s, signal.SIG_IGN)
  except (OSError, ValueError): pass
while True: pass
"""
  expect(cpython, code, 'timeout')
  code = 'import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)'
  expect(cpython, code, 'timeout')


# The result channel.


_FORGED = (
    '{"kind": "none", "error": "", "stdout": "FORGED", "truncated": false}'
)


def test_a_forged_result_is_only_text(sandbox):
  result = run(sandbox, f'print({_FORGED!r})')
  assert result.stdout == _FORGED + '\n'


def test_no_descriptor_leads_to_the_trainer(cpython):
  code = f"""
import os, struct
data = {_FORGED!r}.encode()
frame = struct.pack(">I", len(data)) + data
for fd in range(2, 1024):
  try: os.write(fd, frame)
  except OSError: pass
print("honest")
"""
  result = run(cpython, code)
  assert result.stdout == 'honest\n'
  # Nor can code pass for a failure of the sandbox, which voids an episode.
  code = """
import os
for fd in range(3, 64):
  try: os.write(fd, b"unavailable\\nrefused\\n")
  except OSError: pass
os._exit(1)
"""
  expect(cpython, code, 'crashed')


@pytest.mark.parametrize('then', ['pass', 'time.sleep(9)', 'while True: pass'])
def test_closed_pipes_do_not_hang_the_call(cpython, then):
  code = f'import os, time\nos.closerange(0, 1024)\n{then}'
  expect(cpython, code, 'crashed timeout')


def test_invalid_bytes_are_replaced(cpython):
  code = 'import os\nos.write(1, b"a\\xff\\xfe\\n")'
  assert run(cpython, code).stdout == 'a\ufffd\ufffd\n'


def test_exceptions_that_fight_back(cpython):
  code = 'class E(Exception):\n  def __str__(self): 1 / 0\nraise E'
  expect(cpython, code, 'exception')
  code = (
      'class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E'
  )
  expect(cpython, code, 'timeout')
  code = 'import builtins\nbuiltins.print = builtins.exec = None\n1 / 0'
  expect(cpython, code, 'exception')
  code = 'import sys\nsys.stdout = None\nsys.modules.clear()\nraise KeyError'
  expect(cpython, code, 'exception')
  assert (
      len(expect(cpython, 'raise ValueError("x" * 10**6)', 'exception').error)
      < 5000
  )
  # What it did to the modules was done to its own copy.
  assert expect(cpython, 'print(len([1]))', 'none').stdout == '1\n'
