"""Checkpoints: exact, atomic under SIGKILL, safe under donation, portable."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agent_rl_jax.parallel.mesh import MeshOptions, make_mesh
from agent_rl_jax.train.checkpoint import CheckpointMismatch, Checkpoints


def _state(seed=0, sharding=None):
  rng = np.random.default_rng(seed)
  params = {
      'w': rng.standard_normal((8, 16), np.float32),
      'half': jnp.asarray(rng.standard_normal((4, 8)), jnp.bfloat16),
      'nan': np.array([np.nan, -0.0, np.inf], np.float32),
  }
  tx = optax.adamw(1e-3)
  state = {
      'step': jnp.int32(7),
      'params': jax.tree.map(jnp.array, params),
      'opt': tx.init(params),
      'frozen': None,
  }
  return state if sharding is None else jax.device_put(state, sharding)


def _abstract(state, shard=False):
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=x.sharding if shard else None
      ),
      state,
  )


def _same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_round_trip_is_bit_identical(tmp_path):
  state = _state()
  host = {'cursor': 12, 'baseline': 0.1 + 0.2, 'names': ['a', None]}
  checkpoints = Checkpoints(tmp_path / 'c', keep=2, config={'a.b': (1, 2)})
  assert checkpoints.latest() is None
  assert checkpoints.restore(_abstract(state)) is None
  assert checkpoints.save(3, state, host, {'buffer.npz': b'\x00\xff'})
  host['cursor'] = 99  # The caller goes on while the save is in progress.
  assert not checkpoints.save(3, state, host)
  checkpoints.close()

  again = Checkpoints(tmp_path / 'c', keep=2, config={'a.b': [1, 2]})
  assert again.latest() == 3
  restored, host = again.restore(_abstract(state))
  _same_bits(restored, state)
  assert host == {'cursor': 12, 'baseline': 0.1 + 0.2, 'names': ['a', None]}
  assert again.files() == {'buffer.npz': b'\x00\xff'}
  # As uncommitted as a fresh state, else the train step compiles twice.
  assert not any(x.committed for x in jax.tree.leaves(restored))
  with pytest.raises(FileNotFoundError, match=r'no checkpoint 2.*\[3\]'):
    again.restore(_abstract(state), step=2)
  again.close()


def test_keeps_the_latest(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step in (1, 2, 3, 4):
    checkpoints.save(step, {'x': jnp.full(3, step)}, {'step': step})
  abstract = {'x': jax.ShapeDtypeStruct((3,), jnp.int32)}
  restored, host = checkpoints.restore(abstract)
  assert host == {'step': 4} and restored['x'].tolist() == [4, 4, 4]
  restored, host = checkpoints.restore(abstract, step=3)
  assert host == {'step': 3} and restored['x'].tolist() == [3, 3, 3]
  checkpoints.close()
  assert sorted(p.name for p in tmp_path.iterdir()) == ['3', '4']


def test_reader_beside_a_writer(tmp_path):
  with pytest.raises(FileNotFoundError, match='no checkpoints'):
    Checkpoints(tmp_path / 'absent', read_only=True)
  writer = Checkpoints(tmp_path, keep=1)
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.latest() is None
  state = {'x': jnp.arange(3)}
  writer.save(5, state, {'n': 1})
  writer.wait()
  assert reader.latest() == 5
  assert reader.restore(_abstract(state))[1] == {'n': 1}
  assert reader.host_state() == {'n': 1}
  reader.close()
  writer.close()


def test_saving_survives_donation(tmp_path):
  """The next step overwrites the saved buffers while they are written."""
  bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state = {f'w{i}': jnp.full((512, 512), float(i)) for i in range(8)}
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in range(3):
    checkpoints.save(step, state, {})
    for _ in range(4):
      state = bump(state)
    jax.block_until_ready(state)
  for step in range(3):
    restored, _ = checkpoints.restore(_abstract(state), step)
    for i in range(8):
      value = np.asarray(restored[f'w{i}'])
      assert (value == i + 4 * step).all(), (step, i, np.unique(value))
  checkpoints.close()


def test_restores_onto_another_mesh(tmp_path):
  mesh = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2))
  there = NamedSharding(mesh, PartitionSpec('fsdp', 'tensor'))
  other = make_mesh(MeshOptions(data=1, fsdp=4, tensor=1))
  here = NamedSharding(other, PartitionSpec(None, 'fsdp'))
  value = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {'w': jax.device_put(value, there)}, {})
  for sharding in (here, there, None):
    abstract = {
        'w': jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding)
    }
    restored, _ = checkpoints.restore(abstract)
    assert np.asarray(restored['w']).tobytes() == value.tobytes()
    if sharding is not None:
      assert restored['w'].sharding == sharding
  checkpoints.close()


def test_refuses_another_configuration(tmp_path):
  state = {'x': jnp.zeros(3)}
  checkpoints = Checkpoints(tmp_path, config={'train.lr': 0.1, 'seed': 1})
  checkpoints.save(1, state, {})
  checkpoints.close()
  other = Checkpoints(tmp_path, config={'train.lr': 0.2, 'model.width': 8})
  with pytest.raises(CheckpointMismatch) as error:
    other.restore(_abstract(state))
  message = str(error.value)
  assert 'train.lr: 0.1 in the checkpoint, 0.2 now' in message
  assert 'seed: 1 in the checkpoint, absent now' in message
  assert 'model.width: absent in the checkpoint, 8 now' in message
  other.close()


def test_refuses_another_state(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {'x': jnp.zeros(3), 'y': jnp.zeros(2)}, {})
  with pytest.raises(CheckpointMismatch) as error:
    checkpoints.restore(_abstract({'x': jnp.zeros(4), 'z': jnp.zeros(2)}))
  message = str(error.value)
  assert "x: 'float32[3]' in the checkpoint, 'float32[4]' now" in message
  assert 'y:' in message and 'z:' in message
  checkpoints.close()


def test_refuses_what_cannot_be_saved(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  with pytest.raises(TypeError, match='JSON'):
    checkpoints.save(1, {'x': jnp.zeros(3)}, {'bad': object()})
  for name in ('../up', 'a/b', 'host.json'):
    with pytest.raises(ValueError, match='plain name'):
      checkpoints.save(1, {'x': jnp.zeros(3)}, {}, {name: b''})
  assert checkpoints.latest() is None
  checkpoints.close()


_WRITER = """
import os, sys
import jax, jax.numpy as jnp
from agent_rl_jax.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
start = checkpoints.latest()
if start is not None:
  abstract = {f'w{i}': jax.ShapeDtypeStruct((200, 1000), jnp.float32)
              for i in range(6)}
  state, host = checkpoints.restore(abstract)
  assert host['step'] == start, (host, start)
  for i in range(6):
    assert bool((state[f'w{i}'] == start).all()), (i, start)
step = (start or 0) + 1
while True:
  state = {f'w{i}': jnp.full((200, 1000), float(step)) for i in range(6)}
  checkpoints.save(step, state, {'step': step}, {'f': b'x' * 100_000})
  print('saving', step, flush=True)
  step += 1
"""


def test_sigkill_while_saving(tmp_path):
  """Killed at arbitrary moments: the next run always finds a whole one."""
  root = pathlib.Path(__file__).parents[2]
  environment = {
      **os.environ,
      'PYTHONPATH': str(root),
      'XLA_FLAGS': '',
      'JAX_PLATFORMS': 'cpu',
  }
  rng = np.random.default_rng(0)
  reached = 0
  folder = tmp_path / 'c'
  for _ in range(4):
    process = subprocess.Popen(
        [sys.executable, '-c', _WRITER, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # A few saves after start-up, then at a random moment of the next ones.
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines[-1], process.stderr.read()
    time.sleep(float(rng.uniform(0, 0.3)))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    reader = Checkpoints(folder, read_only=True)
    abstract = {
        f'w{i}': jax.ShapeDtypeStruct((200, 1000), jnp.float32)
        for i in range(6)
    }
    state, host = reader.restore(abstract)
    step = reader.latest()
    assert step >= reached and host == {'step': step}
    assert all(bool((x == step).all()) for x in jax.tree.leaves(state))
    reached = step
    reader.close()
  # What was half written is gone once the next writer has saved.
  (folder / '99999.orbax-checkpoint-tmp').mkdir(exist_ok=True)
  writer = Checkpoints(folder)
  assert writer.latest() == reached
  writer.save(reached + 1, {'x': jnp.zeros(1)}, {})
  writer.close()
  assert all(p.name.isdigit() for p in folder.iterdir()), list(folder.iterdir())


def test_config_is_compared_as_saved(tmp_path):
  """Whatever survives JSON compares equal to itself."""

  @dataclasses.dataclass
  class Section:
    sizes: tuple = (1, 2)

  config = {'s': dataclasses.asdict(Section()), 'lr': 1e-3, 'none': None}
  checkpoints = Checkpoints(tmp_path, config=config)
  checkpoints.save(1, {'x': jnp.zeros(1)}, json.loads('{"a": 1}'))
  state, host = checkpoints.restore(
      {'x': jax.ShapeDtypeStruct((1,), 'float32')}
  )
  assert host == {'a': 1} and state['x'].tolist() == [0]
  checkpoints.close()
