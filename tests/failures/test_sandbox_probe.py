"""The probe finds what is open, and nothing runs where it found something."""

import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import pytest

from agent_rl_jax.tools import python_tool
from agent_rl_jax.tools.sandbox import (
    SandboxOptions,
    SandboxResult,
    SandboxUnavailable,
    make_sandbox,
    probe,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='needs Linux'
)


class _Open:
  """Python in a plain subprocess: what must never pass for a sandbox.

  A call runs in the folder of the calls before it, and with their code in the
  frames and in the memory above its own.
  """

  backend = why = 'open'
  _DRIVER = """
import json, sys
def main():
  earlier, code = json.load(sys.stdin)
  exec(code, {'__name__': '__main__'})
main()
"""

  def __init__(self, folder, refuse=''):
    self._refuse, self._earlier = refuse, ''
    self._folder = folder / 'scratch' / 'box'
    self._folder.mkdir(parents=True, exist_ok=True)
    self.folders = [str(folder)]

  def run(self, code, *, deadline):
    began = time.monotonic()
    if self._refuse:
      return SandboxResult('', 'exception', self._refuse, False, 0.0)
    try:
      done = subprocess.run(
          [sys.executable, '-I', '-S', '-c', self._DRIVER],
          input=json.dumps([self._earlier, code]),
          cwd=self._folder,
          capture_output=True,
          text=True,
          timeout=max(0.01, deadline - began),
          check=False,
      )
    except subprocess.TimeoutExpired:
      return SandboxResult('', 'timeout', 'TimeoutError', False, 0.0)
    self._earlier = code
    kind = 'none' if done.returncode == 0 else 'exception'
    return SandboxResult(done.stdout, kind, done.stderr[-200:], False, 0.0)


_PRIVILEGED = (
    'memory of the trainer',
    'process_vm_readv',
    'ptrace',
    'new namespace',
)


@LINUX
@pytest.mark.parametrize(
    'name',
    [
        'read /etc/passwd',
        'read a file outside',
        'list the root folder',
        'write a file outside',
        'delete a file outside',
        'create a file outside',
        'change a mode outside',
        'environment of the trainer',
        'kill a process outside',
        'fork',
        'start a thread',
        'run a program',
        'socket',
        'abstract socket',
        'huge file',
        'memory of the trainer',
        'process_vm_readv',
        'ptrace',
        'new namespace',
        'raise its own limits',
        'frames of an earlier call',
        'memory of an earlier call',
        'state of an earlier call',
        'folders beside its own',
    ],
)
def test_each_attack_succeeds_where_nothing_stops_it(
    name, monkeypatch, tmp_path
):
  if name in _PRIVILEGED and os.geteuid() != 0:
    pytest.skip('some kernels refuse it to anyone but root')
  (attack,) = [a for a in probe.ATTACKS if a.name == name]
  monkeypatch.setattr(probe, 'ATTACKS', (attack,))
  verdict = probe.probe(_Open(tmp_path), SandboxOptions())
  assert verdict.failed == {name: mock.ANY}


def test_a_sandbox_in_which_nothing_works_does_not_pass(monkeypatch, tmp_path):
  monkeypatch.setattr(probe, 'ATTACKS', probe.ATTACKS[3:5])
  verdict = probe.probe(_Open(tmp_path, refuse='no'), SandboxOptions())
  assert list(verdict.failed) == ['honest code']


@LINUX
@pytest.mark.parametrize(
    'layers, opened',
    [
        (('namespaces', 'landlock'), 'fork'),
        (('namespaces', 'landlock', 'uid'), 'new namespace'),
        (('seccomp', 'uid'), 'read /etc/passwd'),
        ((), 'read /etc/passwd'),
    ],
)
def test_too_few_layers_are_refused(layers, opened, monkeypatch):
  # Without seccomp it succeeds, on nobody, before the attack looked for here.
  group = 'kill everything of this group or user'
  attacks = tuple(a for a in probe.ATTACKS if a.name != group)
  monkeypatch.setattr(probe, 'ATTACKS', attacks)
  options = SandboxOptions(backend='process', layers=layers, processes=1)
  with pytest.raises(SandboxUnavailable, match=f'process: {opened} succeeded'):
    make_sandbox(options)


@LINUX
def test_auto_takes_process_and_falls_back_to_monty_with_the_reason():
  sandbox = make_sandbox(SandboxOptions(processes=1))
  try:
    assert sandbox.backend == 'process'
    assert f'held {len(probe.ATTACKS)} attacks' in sandbox.why
    assert 'seccomp allow-list' in sandbox.why
  finally:
    sandbox.close()
  pytest.importorskip('pydantic_monty')
  sandbox = make_sandbox(SandboxOptions(processes=1, layers=('seccomp',)))
  try:
    assert sandbox.backend == 'monty'
    assert 'read /etc/passwd succeeded' in sandbox.why
    result = sandbox.run('print(6 * 7)', deadline=time.monotonic() + 5)
    assert result.stdout == '42\n'
  finally:
    sandbox.close()


def test_nothing_starts_when_no_backend_holds(monkeypatch):
  monkeypatch.setitem(sys.modules, 'pydantic_monty', None)
  options = SandboxOptions(processes=1, layers=('seccomp',))
  with pytest.raises(SandboxUnavailable) as caught:
    make_sandbox(options)
  text = str(caught.value)
  assert 'process: ' in text and 'monty: ' in text
  assert 'pip install pydantic-monty' in text


# A kernel without some layers: a filter that refuses their system calls is
# loaded first, and every server inherits it.
_POOR = """
import sys, struct, errno
from agent_rl_jax.tools.sandbox import SandboxOptions, SandboxUnavailable
from agent_rl_jax.tools.sandbox import make_sandbox, seccomp
missing = eval(sys.argv[1])
code = seccomp._op(seccomp._LOAD, 0)
for number in missing:
  code += seccomp._op(seccomp._JUMP_EQUAL, number, 0, 1)
  code += seccomp._op(seccomp._RETURN, 0x50000 | errno.EPERM)
code += seccomp._op(seccomp._RETURN, seccomp._ALLOW)
seccomp.set_no_new_privileges()
seccomp.install(code)
try:
  sandbox = make_sandbox(SandboxOptions(backend='process', processes=1))
  print(sandbox.why)
  sandbox.close()
except SandboxUnavailable as error:
  print('REFUSED', error)
"""


def _poor_machine(names):
  numbers = {
      'x86_64': {'unshare': 272, 'landlock': 444},
      'aarch64': {'unshare': 97, 'landlock': 444},
  }[os.uname().machine]
  done = subprocess.run(
      [sys.executable, '-c', _POOR, repr([numbers[name] for name in names])],
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return done.stdout


@LINUX
def test_a_kernel_without_namespaces_or_landlock():
  text = _poor_machine(['unshare'])
  assert 'held' in text and 'without namespaces' in text
  text = _poor_machine(['unshare', 'landlock'])
  assert text.startswith('REFUSED') and 'read /etc/passwd succeeded' in text


_STRANGER = """
import os, sys, types, time
os.setgroups([]); os.setgid(54321); os.setuid(54321); os.chdir('/')
root = sys.argv[1]
for name in ('', '.tools'):
  module = types.ModuleType('agent_rl_jax' + name)
  module.__path__ = [root + '/agent_rl_jax' + name.replace('.', '/')]
  sys.modules[module.__name__] = module
from agent_rl_jax.tools.sandbox import SandboxOptions, make_sandbox
options = SandboxOptions(backend='process', processes=1, layers=eval(sys.argv[2]))
sandbox = make_sandbox(options)
result = sandbox.run('print(6 * 7)', deadline=time.monotonic() + 5)
print(result.stdout.strip(), sandbox.why)
sandbox.close()
"""


def _public_python():
  """An interpreter of 3.11 or later that another user may run."""
  for path in (sys.executable, '/usr/bin/python3'):
    real = pathlib.Path(os.path.realpath(path))
    if not real.exists():
      continue
    if any(not p.stat().st_mode & 0o001 for p in [real, *real.parents]):
      continue
    check = 'import sys; sys.exit(sys.version_info < (3, 11))'
    if subprocess.run([real, '-c', check], check=False).returncode == 0:
      return str(real)
  return None


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can become another')
@pytest.mark.parametrize(
    'layers',
    [
        ('namespaces', 'landlock', 'seccomp', 'uid'),
        ('landlock', 'seccomp'),
    ],
)
def test_an_unprivileged_user_gets_a_sandbox_too(layers):
  python = _public_python()
  readable = all(p.stat().st_mode & 0o001 for p in [ROOT, *ROOT.parents])
  if python is None or not readable:
    pytest.skip('nothing here that another user may run')
  done = subprocess.run(
      [python, '-c', _STRANGER, str(ROOT), repr(layers)],
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  assert done.stdout.startswith('42 process: ') and 'held' in done.stdout


def test_options_name_the_value_and_the_fix():
  with pytest.raises(ValueError, match='wall_seconds is 0: it must be above 0'):
    SandboxOptions(wall_seconds=0)
  with pytest.raises(ValueError, match='cpu_seconds is 0.5'):
    SandboxOptions(cpu_seconds=0.5)
  with pytest.raises(ValueError, match='choose from'):
    SandboxOptions(layers=('seccom',))
  with pytest.raises(ValueError, match="backend is 'docker': choose from"):
    make_sandbox(SandboxOptions(backend='docker'))


# The tool.


@pytest.mark.parametrize(
    'kind, infrastructure',
    [
        ('unavailable', True),
        ('timeout', False),
        ('crashed', False),
        ('none', False),
    ],
)
def test_a_failure_of_the_sandbox_is_not_the_codes(kind, infrastructure):
  sandbox = _Answers('', kind, 'words', False, 0.0, '/tmp/x of process 77')
  answer = python_tool.PythonTool(sandbox)({'code': ''}, deadline=0.0)
  assert answer.infrastructure == infrastructure
  assert '77' not in answer.text


class _Answers:
  backend = why = 'scripted'
  closed = False

  def __init__(self, *result):
    self._result = SandboxResult(*result)

  def run(self, code, *, deadline):
    return self._result

  def close(self):
    self.closed = True


@pytest.mark.parametrize(
    'result, ok, text',
    [
        (('51609\n', 'none', '', False, 0.0), True, '51609'),
        (('a\n\n', 'none', '', False, 0.0), True, 'a\n'),
        (('', 'none', '', False, 0.0), True, '(no output; use print to see a'),
        (('1', 'exception', 'KeyError: 1', False, 0.0), False, 'KeyError: 1'),
        (('x' * 900, 'none', '', False, 0.0), True, '\n[output cut]'),
        (('x' * 20, 'none', '', True, 0.0), True, 'xxxx\n[output cut]'),
    ],
)
def test_python_tool_text(result, ok, text):
  sandbox = _Answers(*result)
  tool = python_tool.PythonTool(sandbox, max_chars=100)
  answer = tool({'code': ''}, deadline=0.0)
  assert answer.ok == ok and text in answer.text
  assert len(answer.text) <= 110
  assert tool.spec['name'] == 'python'
  tool.close()
  assert sandbox.closed
