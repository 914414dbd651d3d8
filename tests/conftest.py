"""Eight fake CPU devices for every test, and rank promotion is an error.

Ctrl-C works, whoever started the tests; programs are compiled once for all.
"""

import atexit
import os
import shutil
import signal
import tempfile

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

# A shell's background jobs, and all that they start, ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# One program is compiled once for all tests and the processes that they start.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _CACHE = tempfile.mkdtemp(prefix='agent_rl_jax_tests_')
  atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
