"""Eight fake CPU devices for every test, and rank promotion is an error."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests compile much and compute little: LLVM's optimizer is not worth its
# time here.  XLA's own passes, and so the programs, stay as they are.
for flag, value in (
    ('--xla_force_host_platform_device_count', '8'),
    ('--xla_backend_optimization_level', '0'),
):
  if flag not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = (
        f'{os.environ.get("XLA_FLAGS", "")} {flag}={value}'
    )

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
