"""Hostile code against every backend: contained, on time, next call works.

`process` is this machine's full set of layers; `process-bare` is what an
unprivileged process has inside a container: no namespaces, no other user.
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

from agent_rl_jax.tools.sandbox import SandboxOptions, options
from agent_rl_jax.tools.sandbox.monty import MontySandbox
from agent_rl_jax.tools.sandbox.process import ProcessSandbox

SECONDS = 4.0
LATE = 0.3  # what a loaded machine may add

LIMITS = dict(
    wall_seconds=1.0,
    cpu_seconds=1,
    memory_bytes=128 << 20,
    output_bytes=2000,
    file_bytes=1 << 20,
    processes=2,
)


def _make(name):
  if name == 'monty':
    pytest.importorskip('pydantic_monty')
    # Running and sleeping share the wall-clock limit there.
    limits = {**LIMITS, 'wall_seconds': 2.0}
    return MontySandbox(SandboxOptions(backend='monty', **limits))
  if not sys.platform.startswith('linux'):
    pytest.skip('the process backend needs Linux')
  layers = options.LAYERS
  if name == 'process-bare':
    layers = ('landlock', 'seccomp')
  made = ProcessSandbox(SandboxOptions(layers=layers, **LIMITS))
  if 'seccomp' in made.missing or (
      name == 'process-bare' and 'landlock' in made.missing
  ):
    made.close()
    pytest.skip(f'this machine lacks {made.missing}')
  return made


@pytest.fixture(scope='module', params=['process', 'process-bare', 'monty'])
def sandbox(request):
  made = _make(request.param)
  yield made
  made.close()


@pytest.fixture(scope='module', params=['process', 'process-bare'])
def cpython(request):
  made = _make(request.param)
  yield made
  made.close()


def run(sandbox, code, seconds=SECONDS):
  """Runs code; asserts that the answer is on time and the next call works."""
  began = time.monotonic()
  result = sandbox.run(code, deadline=began + seconds)
  assert time.monotonic() - began < seconds + LATE
  after = sandbox.run('print(6 * 7)', deadline=time.monotonic() + 10)
  assert (after.stdout, after.error_kind) == ('42\n', 'none'), after
  assert 'BREACH' not in result.stdout
  return result


def expect(sandbox, code, kinds, **keywords):
  result = run(sandbox, code, **keywords)
  assert result.error_kind in kinds.split(), result
  return result


def test_honest_code_prints_and_errors_show_their_last_line(sandbox):
  result = run(sandbox, 'a=965;b=54;c=501;print(a*b-c)')
  assert result.stdout == '51609\n'
  assert (result.error_kind, result.error) == ('none', '')
  result = expect(sandbox, 'print(1)\nprint(1 / 0)', 'exception')
  assert result.error == 'ZeroDivisionError: division by zero'
  assert result.stdout == '1\n'
  result = expect(sandbox, 'def (', 'exception')
  assert result.error.startswith('SyntaxError')
  assert run(sandbox, '').stdout == ''


def test_random_draws_and_sets_are_the_same_in_every_call(sandbox):
  code = 'import random\nprint(random.random(), set("abcdefgh"))'
  answers = {run(sandbox, code).stdout for _ in range(3)}
  assert len(answers) == 1


@pytest.mark.parametrize(
    'code',
    [
        'while True: pass',
        'def f():\n  while True:\n    try:\n      while True: pass\n'
        '    except BaseException: pass\nf()',
        'import time\nwhile True: time.sleep(100)',
    ],
)
def test_endless_code_ends_as_a_timeout(sandbox, code):
  expect(sandbox, code, 'timeout')


def test_a_deadline_earlier_than_the_limit_counts(sandbox):
  expect(sandbox, 'import time\ntime.sleep(1.2)', 'timeout', seconds=0.4)
  result = sandbox.run('print(1)', deadline=time.monotonic() - 1)
  assert result.error_kind == 'unavailable'  # it was not tried


@pytest.mark.parametrize(
    'code',
    [
        'x = [0] * (1 << 30)',  # 8 GB
        'x = "a" * (8 << 30)',
        'x = []\nwhile True: x.append("a" * 1000000)',
        'print(10 ** (10 ** 10))',
    ],
)
def test_huge_allocations_end_in_a_memory_error(sandbox, code):
  # A power is computed before its size is checked: time may end it first.
  expect(sandbox, code, 'memory timeout')


def test_output_is_cut_and_a_flood_is_stopped(sandbox):
  result = run(sandbox, 'print("x" * 5000)')
  assert result.stdout == 'x' * 2000
  assert result.truncated and result.error_kind == 'none'
  result = expect(
      sandbox,
      'for _ in range(1000000): print("y" * 1000)',  # 1 GB
      'output timeout',
  )
  assert result.truncated and len(result.stdout) == 2000
  # A character is not cut in two.
  result = run(sandbox, 'print("a" + "é" * 5000)')
  assert result.stdout == 'a' + 'é' * 999


def test_strange_text_comes_back_as_text(sandbox):
  result = run(sandbox, 'print("\\ud800 \\x00 é")')
  assert 'é' in result.stdout and result.error_kind == 'none'
  result = run(sandbox, 'print("\ud800")')  # in the code itself
  assert result.error_kind in ('none', 'exception')
  run(sandbox, 'print("\x00")')
  expect(sandbox, '#' * 3_000_000, 'exception')


def test_deep_recursion(sandbox):
  expect(sandbox, 'def f(n): return f(n + 1)\nf(0)', 'exception')
  nested = 'x = []\nfor _ in range(300000): x = [x]\nprint(str(x)[:0])'
  code = 'import sys\nsys.setrecursionlimit(10**9)\n' + nested
  expect(sandbox, code, 'exception crashed memory timeout none')
  # `f` takes stack or memory until one of them ends.
  code = 'import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()'
  expect(sandbox, code, 'exception crashed memory timeout')
  code = 'print(' + '(' * 5000 + ')' * 5000 + ')'
  expect(sandbox, code, 'exception crashed memory none')


@pytest.mark.parametrize(
    'code', ['import os\nos._exit(0)', 'import os\nos._exit(7)']
)
def test_leaving_early_is_not_a_good_end(sandbox, code):
  result = expect(sandbox, code, 'crashed exception')
  assert result.error


def test_exit_codes_and_input(cpython):
  assert run(cpython, 'import sys\nprint(1)\nsys.exit()').stdout == '1\n'
  expect(cpython, 'import sys\nsys.exit()', 'none')
  assert expect(cpython, 'exit_me = 1\nraise SystemExit("no")', 'exception')
  assert expect(cpython, 'input()', 'exception').error.startswith('EOFError')
  result = expect(cpython, 'import os\nos.abort()', 'crashed')
  assert 'SIGABRT' in result.error
  result = expect(cpython, 'import ctypes\nctypes.string_at(0)', 'crashed')
  assert 'SIGSEGV' in result.error


# Files.


def test_files_outside_cannot_be_read(sandbox, tmp_path):
  secret = tmp_path / 'secret.txt'
  secret.write_text('BREACH')
  tmp_path.chmod(0o755)
  secret.chmod(0o644)
  here = os.path.abspath(__file__)
  for path in ('/etc/passwd', '/etc/hostname', here, str(secret), '/proc/self'):
    result = run(sandbox, f'print("BREACH", open({path!r}).read())')
    assert result.error_kind == 'exception', (path, result)
  for path in ('/', '/etc', '/tmp', '/proc', str(tmp_path)):
    result = run(sandbox, f'import os\nprint("BREACH", os.listdir({path!r}))')
    assert result.error_kind == 'exception', (path, result)


def test_files_outside_cannot_be_changed(sandbox, tmp_path):
  victim = tmp_path / 'victim.txt'
  victim.write_text('intact')
  tmp_path.chmod(0o777)
  victim.chmod(0o666)
  status = os.stat(victim)
  for action in (
      f'open({str(victim)!r}, "w").write("x")',
      f'open({str(victim)!r}, "a").write("x")',
      f'open({str(tmp_path / "new")!r}, "w")',
      f'os.unlink({str(victim)!r})',
      f'os.rename({str(victim)!r}, {str(tmp_path / "moved")!r})',
      f'os.truncate({str(victim)!r}, 0)',
      f'os.open({str(victim)!r}, os.O_RDONLY | os.O_TRUNC)',
      f'os.chmod({str(victim)!r}, 0)',
      f'os.utime({str(victim)!r}, (0, 0))',
      f'os.setxattr({str(victim)!r}, "user.x", b"1")',
      f'os.mkdir({str(tmp_path / "folder")!r})',
      f'os.symlink({str(victim)!r}, "link")',
      f'os.link({str(victim)!r}, "link")',
      f'os.mkfifo({str(tmp_path / "fifo")!r})',
  ):
    result = run(sandbox, f'import os\n{action}\nprint("BREACH")')
    assert result.error_kind == 'exception', (action, result)
  assert victim.read_text() == 'intact'
  assert os.listdir(tmp_path) == ['victim.txt']
  after = os.stat(victim)
  assert (after.st_mode, after.st_mtime_ns) == (
      status.st_mode,
      status.st_mtime_ns,
  )


def test_python_itself_cannot_be_changed(cpython):
  code = 'import os\nopen(os.__file__, "a")\nprint("BREACH")'
  expect(cpython, code, 'exception')
  code = 'import os\nos.truncate(os.__file__, 0)\nprint("BREACH")'
  expect(cpython, code, 'exception')
  # Modules that were not imported beforehand are there, and it still works.
  assert run(cpython, 'import colorsys, wave\nprint(1)').stdout == '1\n'


def test_the_scratch_folder_is_writable_and_fresh(cpython):
  code = 'open("a.txt", "w").write("hello")\nprint(open("a.txt").read())'
  assert run(cpython, code).stdout == 'hello\n'
  code = """
import os, tempfile
assert os.listdir() == [], os.listdir()
with tempfile.TemporaryDirectory() as d:
  open(d + "/x", "w").write("1")
for i in range(20):
  os.mkdir("d"); os.chdir("d")
os.mkdir("shut", 0)
open("\\udcff", "w")
print("made")
"""
  for _ in range(cpython._options.processes + 1):
    assert expect(cpython, code, 'none').stdout == 'made\n'


def test_what_a_call_leaves_is_removed_however_it_is_nested(cpython):
  code = 'import os\nfor i in range(1500):\n  os.mkdir("d"); os.chdir("d")'
  expect(cpython, code, 'none output')
  for _ in range(cpython._options.processes + 1):
    result = run(cpython, 'import os\nprint(os.listdir())')
    assert result.stdout == '[]\n'


def test_the_folder_of_another_call_is_out_of_reach(cpython):
  answers = []

  def other():
    code = (
        'import os, time\nopen("mine", "w").write("BREACH")\ntime.sleep(0.6)\n'
        'print(os.listdir(), open("mine").read())'
    )
    answers.append(cpython.run(code, deadline=time.monotonic() + SECONDS))

  thread = threading.Thread(target=other)
  thread.start()
  time.sleep(0.2)
  code = f"""
import os, glob
tried = 0
for name in glob.glob("{cpython._folder}/*/*/*") + [
    "{cpython._folder}/server-%d/scratch/box" % pid for pid in {cpython.pids}
]:
  if os.path.realpath(name) == os.getcwd(): continue
  for what in (lambda: os.listdir(name), lambda: open(name + "/mine").read(),
               lambda: open(name + "/theirs", "w")):
    tried += 1
    try: print("BREACH", what())
    except OSError: pass
print(tried)
"""
  result = run(cpython, code)
  thread.join()
  assert int(result.stdout) >= 3
  assert answers[0].stdout == "['mine'] BREACH\n"


def test_files_are_limited_in_size_and_number(cpython):
  code = 'f = open("big", "wb")\nwhile True: f.write(b"x" * 65536)'
  result = expect(cpython, code, 'exception')
  assert result.error.startswith('OSError')
  code = """
import time
for i in range(100000):
  open(str(i), "wb").write(b"x" * 1000000)
  if i > 40: time.sleep(0.02)
print("BREACH")
"""
  expect(cpython, code, 'exception output')


# Processes.


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
