"""Calls that leave or look for something: nothing passes between them.

`process` is this machine's full set of layers; `process-bare` is what an
unprivileged process has inside a container: no namespaces, no other user.
"""

import os
import sys
import time

import pytest

from agent_rl_jax.tools.sandbox import SandboxOptions, options, probe
from agent_rl_jax.tools.sandbox.monty import MontySandbox
from agent_rl_jax.tools.sandbox.process import ProcessSandbox

LINUX = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='needs Linux'
)


@pytest.fixture(scope='module', params=['process', 'process-bare'])
def cpython(request):
  if not sys.platform.startswith('linux'):
    pytest.skip('the process backend needs Linux')
  bare = request.param == 'process-bare'
  layers = ('landlock', 'seccomp') if bare else options.LAYERS
  limits = dict(wall_seconds=1.5, cpu_seconds=1, processes=1)
  made = ProcessSandbox(SandboxOptions(layers=layers, **limits))
  if made.missing:
    made.close()
    pytest.skip(f'this machine lacks {made.missing}')
  yield made
  made.close()


def run(sandbox, code, seconds=6.0):
  result = sandbox.run(code, deadline=time.monotonic() + seconds)
  assert 'BREACH' not in result.stdout
  return result


@pytest.mark.parametrize(
    'name', [attack.name for attack in probe.ATTACKS if attack.before]
)
def test_an_earlier_call_leaves_no_trace(cpython, name):
  (attack,) = [a for a in probe.ATTACKS if a.name == name]
  secret = os.urandom(16).hex()
  facts = {'secret': secret, 'terces': secret[::-1]}
  for between in (0, 1, 1):
    run(cpython, attack.before.format(**facts))
    for _ in range(between):
      run(cpython, 'print(1)')
    assert run(cpython, attack.code.format(**facts)).error_kind == 'none'


def test_an_earlier_call_with_much_code_leaves_no_trace(cpython):
  (attack,) = [a for a in probe.ATTACKS if 'memory of an earl' in a.name]
  secret = os.urandom(16).hex()
  facts = {'secret': secret, 'terces': secret[::-1]}
  run(cpython, f'x = {secret!r}\n' * 20_000)  # more than a pipe holds
  assert run(cpython, attack.code.format(**facts)).error_kind == 'none'


def test_the_frames_above_the_code_hold_nothing_of_the_server(cpython):
  code = """
import sys
frame, names = sys._getframe(), []
while frame:
  names.append(frame.f_code.co_name)
  print(frame.f_locals if frame.f_back and names[1:] else "")
  frame = frame.f_back
print(names, sys.argv, sys.orig_argv)
"""
  text = run(cpython, code).stdout
  names = "['<module>', '_outcome', '_execute', '<module>'] [''] ['']"
  assert text.splitlines()[-1] == names
  for word in (cpython._folder, 'memory_bytes', f'server-{cpython.pids[0]}'):
    assert word not in text


def test_no_open_file_is_shared_between_calls(cpython):
  code = """
import fcntl, os
flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in range(3)]
print([bool(f & (os.O_APPEND | os.O_NONBLOCK)) for f in (flags[0], flags[2])])
for fd in range(3):
  fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK | flags[fd])
"""
  for _ in range(2):
    assert run(cpython, code).stdout == '[False, False]\n'
  code = 'import fcntl\nfcntl.flock(0, fcntl.LOCK_EX)\nprint("BREACH")'
  assert run(cpython, code).error_kind == 'exception'


def test_errors_may_be_printed_and_are_not_shown(cpython):
  code = 'import sys\nprint("x" * 200000, file=sys.stderr)\nprint(1)'
  result = run(cpython, code)
  assert (result.stdout, result.error_kind) == ('1\n', 'none')
  assert run(cpython, 'print(repr(input()))').error.startswith('EOFError')


@pytest.mark.parametrize('descriptor', [1, 2, 3])
def test_a_flood_into_any_pipe_is_stopped(cpython, descriptor):
  code = f'import os\nwhile True: os.write({descriptor}, b"x" * 4096)'
  assert run(cpython, code).error_kind == 'output'


@pytest.mark.parametrize(
    'error, line',
    [
        ('SystemExit("a\\nb")', 'b'),
        ('SystemExit(3)', 'SystemExit: 3'),
        ('E()', None),
        ('F()', None),
    ],
)
def test_exits_of_all_kinds_give_one_line(cpython, error, line):
  code = f"""
class Odd:
  def __str__(self): 1 / 0
  __eq__ = __repr__ = __str__
class E(SystemExit):
  def __init__(self): self.code = Odd()
class F(SystemExit):
  code = property(lambda self: 1 / 0)
  __str__ = lambda self: 1 / 0
raise {error}
"""
  result = run(cpython, code)
  assert result.error_kind == 'exception'
  assert '\n' not in result.error and result.error
  assert line is None or result.error == line


# What may be written.


@pytest.mark.parametrize('noise', ['', 'os.write(1, b".")'])
def test_files_are_counted_however_busy_the_code_is(cpython, noise):
  code = f"""
import os, time
for i in range(100):
  open(str(i), "wb").write(b"x" * 1000000)
  {noise}
  if i > 16: time.sleep(0.01)
print("BREACH")
"""
  assert run(cpython, code).error_kind in ('output', 'exception')


def test_files_without_a_name_are_few(cpython):
  code = """
import os
held = []
for i in range(30):
  held.append(open("u", "wb"))
  held[-1].write(b"x" * 1000000)
  held[-1].flush()
  os.unlink("u")
print("BREACH")
"""
  assert run(cpython, code).error_kind == 'exception'


def test_space_cannot_be_reserved(cpython):
  code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
f = os.open("u", os.O_RDWR | os.O_CREAT)
result = libc.fallocate(f, 1, ctypes.c_long(0), ctypes.c_long(100 << 20))
print(result, os.fstat(f).st_blocks)
"""
  assert run(cpython, code).stdout == '-1 0\n'


def test_few_descriptors_are_enough_for_honest_code(cpython):
  code = """
import sqlite3, tempfile, zipfile, colorsys, wave
base = sqlite3.connect("base.sqlite")
base.execute("create table t (x)")
base.execute("insert into t values (1)")
base.commit()
with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile("z", "w") as z:
  files = [open(f"{folder}/{i}", "w") for i in range(6)]
  z.writestr("a", "b")
print(base.execute("select x from t").fetchall())
"""
  assert run(cpython, code).stdout == '[(1,)]\n'


# What a model reads of a limit.


@LINUX
@pytest.mark.parametrize('backend', [ProcessSandbox, MontySandbox])
def test_limits_are_told_in_the_same_words_however_long_it_took(backend):
  if backend is MontySandbox:
    pytest.importorskip('pydantic_monty')
  made = backend(SandboxOptions(processes=1, wall_seconds=0.8))
  try:
    for code in (
        'while True: pass',
        'x = []\nwhile True: x.append("a" * 10**6)',
    ):
      results = [run(made, code, seconds) for seconds in (0.5, 0.7, 3.0)]
      results = [r for r in results if r.error_kind != 'unavailable']
      lines = {(r.error_kind, r.error) for r in results}
      assert lines <= {
          ('timeout', 'TimeoutError: more than 0.8 s'),
          ('memory', 'MemoryError'),
      }
      assert len(lines) == 1 or 'append' in code
  finally:
    made.close()
