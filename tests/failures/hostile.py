"""Sandboxes for hostile code, and what every call of it must satisfy.

`process` is this machine's full set of layers; `process-bare` is what an
unprivileged process has inside a container: no namespaces, no other user.
"""

import sys
import time

import pytest

from agent_rl_jax.tools.sandbox import SandboxOptions, options
from agent_rl_jax.tools.sandbox.monty import MontySandbox
from agent_rl_jax.tools.sandbox.process import ProcessSandbox

SECONDS = 4.0
LATE = 5.0  # what a loaded machine may add; an escape lasts for ever

LIMITS = dict(
    wall_seconds=1.0,
    cpu_seconds=1,
    memory_bytes=128 << 20,
    output_bytes=2000,
    file_bytes=1 << 20,
    processes=2,
)


def make(name):
  """A sandbox by name; skips the test where it cannot be had."""
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
  """Runs code that must end in one of these ways, named by words."""
  result = run(sandbox, code, **keywords)
  assert result.error_kind in kinds.split(), result
  return result
