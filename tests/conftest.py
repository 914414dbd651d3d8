"""Eight fake CPU devices for every test, and rank promotion is an error."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_FLAG = '--xla_force_host_platform_device_count'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAG}=8'

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
