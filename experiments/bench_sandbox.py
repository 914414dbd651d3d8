"""Cost of a sandbox call, per backend, side by side.

  python -m experiments.bench_sandbox --calls=200 --rounds=3

Backends take turns (A B A B), so that a machine that gets busier does not
favour one.  As measured on two quiet x86-64 cores: median of process 9.0 ms
(95th percentile 11.6), of monty 0.8 ms a call; at a load of 8, process 12 to
14 ms.
"""

import statistics
import time
from collections.abc import Sequence

from absl import app, flags

from agent_rl_jax.tools.sandbox import (
    BACKENDS,
    SandboxOptions,
    SandboxUnavailable,
    make_sandbox,
)

_CALLS = flags.DEFINE_integer('calls', 100, 'Calls per backend and round.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Turns that each backend gets.')
_CODE = flags.DEFINE_string(
    'code', 'a=965;b=54;c=501;print(a*b-c)', 'Code of a call.'
)


def main(argv: Sequence[str]) -> None:
  del argv
  sandboxes = {}
  for name in BACKENDS:
    began = time.perf_counter()
    try:
      sandbox = make_sandbox(SandboxOptions(backend=name, processes=1))
    except SandboxUnavailable as error:
      print(f'{name}: {error}')
      continue
    sandboxes[name] = sandbox
    print(f'{sandbox.why} (started in {time.perf_counter() - began:.1f} s)')
  milliseconds = {name: [] for name in sandboxes}
  for _ in range(_ROUNDS.value):
    for name, sandbox in sandboxes.items():
      for _ in range(_CALLS.value):
        began = time.perf_counter()
        sandbox.run(_CODE.value, deadline=time.monotonic() + 30.0)
        milliseconds[name].append(1e3 * (time.perf_counter() - began))
  for name, values in milliseconds.items():
    p95 = statistics.quantiles(values, n=20)[-1]
    print(
        f'{name:8} {len(values)} calls: median {statistics.median(values):.2f}'
        f' ms, 95th percentile {p95:.2f} ms'
    )
  for sandbox in sandboxes.values():
    sandbox.close()


if __name__ == '__main__':
  app.run(main)
