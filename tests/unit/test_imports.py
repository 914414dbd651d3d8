"""The direction law, parsed: rooms import downwards, hosts without jax."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = 'agent_rl_jax'

# A room may import itself, and what stands on a lower level.
LEVELS = {
    'experiments': 7,
    'train': 6,
    'rollout': 5,
    'algorithms': 5,
    'weights': 5,
    'data': 5,
    'models': 4,
    'text': 4,
    'envs': 4,
    'worlds': 4,
    'parallel': 3,
    'tools': 3,
    'rewards': 3,
    'batch': 2,
    'types': 1,
}
# What a room may import of the package besides itself, where that is less.
ONLY = {'algorithms': {'batch'}, 'batch': set(), 'types': set()}
WITHOUT_JAX = {'tools', 'envs', 'rewards', 'text', 'data', 'types'}
DEVICE_PACKAGES = {'jax', 'jaxlib', 'flax', 'optax', 'orbax'}
WITHOUT_IO = {'models', 'algorithms', 'worlds'}
IO_MODULES = {
    'os', 'io', 'pathlib', 'shutil', 'socket', 'subprocess', 'tempfile',
    'urllib', 'requests', 'logging', 'threading',
}  # fmt: skip
IO_CALLS = {'open', 'print', 'input'}


def _room(path):
  parts = path.relative_to(ROOT).parts
  if parts[0] == PACKAGE and len(parts) > 1:
    return parts[1].removesuffix('.py')
  return parts[0]


def _imports(tree):
  """Yields (line, module) of every import, inside functions too."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        yield node.lineno, '.' * node.level + (node.module or '')
      elif node.module == PACKAGE:
        for alias in node.names:
          yield node.lineno, f'{PACKAGE}.{alias.name}'
      else:
        yield node.lineno, node.module


def violations(room, source):
  """Returns 'line: what is wrong' for one file of `room`."""
  tree = ast.parse(source)
  found = []
  for line, module in _imports(tree):
    top = module.split('.')[0]
    if module.startswith('.'):
      found.append(f'{line}: relative import of {module}')
    elif top == PACKAGE:
      other = module.split('.')[1] if '.' in module else ''
      if other == room or not other:
        continue
      if other not in LEVELS:
        found.append(f'{line}: {other} is no room that this test knows')
      elif room in ONLY and other not in ONLY[room]:
        found.append(f'{line}: {room} may not import {other}')
      elif LEVELS[other] >= LEVELS[room]:
        found.append(f'{line}: {room} may not import {other}, which is above')
    elif top in ('experiments', 'configs', 'tests') and top != room:
      if room != 'experiments' or top == 'tests':
        found.append(f'{line}: {room} may not import {top}')
    elif room in WITHOUT_JAX and top in DEVICE_PACKAGES:
      found.append(f'{line}: {room} may not import {top}')
    elif room in WITHOUT_IO and top in IO_MODULES:
      found.append(f'{line}: {room} does no I/O and may not import {top}')
  if room in WITHOUT_IO:
    for node in ast.walk(tree):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in IO_CALLS:
          found.append(f'{node.lineno}: {room} does no I/O: {node.func.id}()')
  return found


def _files():
  folders = [ROOT / PACKAGE, ROOT / 'experiments']
  return [path for folder in folders for path in sorted(folder.rglob('*.py'))]


def test_every_room_has_a_level():
  rooms = {_room(path) for path in _files()} - {'__init__'}
  assert rooms <= set(LEVELS)


@pytest.mark.parametrize('room', sorted(LEVELS))
def test_room_keeps_the_law(room):
  found = [
      f'{path.relative_to(ROOT)}:{violation}'
      for path in _files()
      if _room(path) == room
      for violation in violations(room, path.read_text('utf-8'))
  ]
  assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    'room, source',
    [
        ('tools', 'import jax'),
        ('text', 'def f():\n  import jax.numpy as jnp'),
        ('types', 'from flax import struct'),
        ('models', 'from agent_rl_jax.rollout import slots'),
        ('models', 'from agent_rl_jax import rollout'),
        ('models', 'import agent_rl_jax.text.chat'),
        ('models', 'import pathlib'),
        ('worlds', 'print(1)'),
        ('algorithms', 'from agent_rl_jax.models import policy'),
        ('rollout', 'from agent_rl_jax.algorithms import losses'),
        ('train', 'from experiments import train'),
        ('train', 'from configs import base'),
        ('train', 'from . import loop'),
        ('experiments', 'from tests import conftest'),
        ('train', 'from agent_rl_jax.utils import x'),
    ],
)
def test_the_law_can_be_broken(room, source):
  assert len(violations(room, source)) == 1


@pytest.mark.parametrize(
    'room, source',
    [
        ('train', 'from agent_rl_jax.rollout import engine'),
        ('envs', 'from agent_rl_jax.tools import executor'),
        ('algorithms', 'from agent_rl_jax.algorithms import kl'),
        ('algorithms', 'from agent_rl_jax import batch\nimport jax'),
        ('experiments', 'from configs import base'),
        ('rewards', 'from agent_rl_jax import types'),
    ],
)
def test_the_law_allows_what_it_should(room, source):
  assert violations(room, source) == []


def test_host_rooms_run_without_jax():
  """Importing every module of them in a fresh process loads no jax.

  data is left out: grain itself imports jax where it finds it.
  """
  modules = [
      '.'.join(path.relative_to(ROOT).with_suffix('').parts)
      for path in _files()
      if _room(path) in WITHOUT_JAX - {'data'} and path.stem != '__init__'
  ]
  code = (
      'import importlib, sys\n'
      f'for name in {modules!r}: importlib.import_module(name)\n'
      "print('\\n'.join(sorted({'jax', 'jaxlib'} & set(sys.modules))))\n"
  )
  done = subprocess.run(
      [sys.executable, '-c', code],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == ''
