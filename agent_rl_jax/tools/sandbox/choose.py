"""Makes the sandbox that a start-up probe confirms.

Leaves out the attacks (probe.py) and the backends.  Invariant: code runs only
in a sandbox that has just contained every attack; there is no unprotected one.
"""

from agent_rl_jax.tools.sandbox import monty, probe, process
from agent_rl_jax.tools.sandbox import options as options_lib

# Strongest first: the order in which `auto` tries them.
BACKENDS = {
    'process': process.ProcessSandbox,
    'monty': monty.MontySandbox,
}


def make_sandbox(options: options_lib.SandboxOptions) -> options_lib.Sandbox:
  """Starts the chosen backend, attacks it, and returns it if it held.

  Raises:
    SandboxUnavailable: No backend held, or the chosen one did not.
    ValueError: The backend's name is unknown.
  """
  if options.backend != 'auto' and options.backend not in BACKENDS:
    raise ValueError(
        f'backend is {options.backend!r}: choose from' f' {["auto", *BACKENDS]}'
    )
  names = BACKENDS if options.backend == 'auto' else [options.backend]
  reasons = []
  for name in names:
    try:
      sandbox = BACKENDS[name](options)
    except options_lib.SandboxUnavailable as error:
      reasons.append(f'{name}: {error}')
      continue
    try:
      verdict = probe.probe(sandbox, options)
    except BaseException:
      sandbox.close()
      raise
    if not verdict.failed:
      sandbox.why += f'; held {verdict.attempted} attacks'
      if reasons:
        sandbox.why += f' (not {"; not ".join(reasons)})'
      return sandbox
    sandbox.close()
    failures = [f'{what} {how}' for what, how in verdict.failed.items()]
    reasons.append(f'{name}: {", ".join(failures)}')
  raise options_lib.SandboxUnavailable(
      'no sandbox holds on this machine, and code is never run unprotected:\n  '
      + '\n  '.join(reasons)
      + '\nThe process backend needs Linux with seccomp and Landlock or user'
      ' namespaces; the monty backend needs pip install pydantic-monty.'
  )
