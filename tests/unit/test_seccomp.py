"""The seccomp filter itself, on a small machine for its instructions."""

import pytest

from agent_rl_jax.tools.sandbox import seccomp


def _filter(code, arch, number, *arguments):
  words = {0: number, 4: arch}
  for i in range(6):
    value = arguments[i] if i < len(arguments) else 0
    words[16 + 8 * i], words[20 + 8 * i] = value & 0xFFFFFFFF, value >> 32
  program = [
      (
          int.from_bytes(code[i : i + 2], 'little'),
          code[i + 2],
          code[i + 3],
          int.from_bytes(code[i + 4 : i + 8], 'little'),
      )
      for i in range(0, len(code), 8)
  ]
  at = accumulator = 0
  while True:
    operation, yes, no, k = program[at]
    at += 1
    if operation == 0x20:
      accumulator = words[k]
    elif operation == 0x54:
      accumulator &= k
    elif operation == 0x15:
      at += yes if accumulator == k else no
    elif operation == 0x35:
      at += yes if accumulator >= k else no
    else:
      assert operation == 0x06
      return k


ALLOW, KILL, REFUSE, MISSING = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
X86, ARM = ('x86_64', 0xC000003E), ('aarch64', 0xC00000B7)


@pytest.mark.parametrize(
    'machine, number, arguments, verdict',
    [
        (X86, 0, (), ALLOW),  # read
        (ARM, 63, (), ALLOW),
        (X86, 41, (2, 1, 0), REFUSE),  # socket
        (ARM, 198, (2, 1, 0), REFUSE),
        (X86, 56, (17,), REFUSE),  # clone
        (ARM, 220, (17,), REFUSE),
        (X86, 435, (), MISSING),  # clone3
        (ARM, 435, (), MISSING),
        (X86, 59, (), REFUSE),  # execve
        (ARM, 221, (), REFUSE),
        (X86, 62, (77, 9), ALLOW),  # kill
        (X86, 62, (78, 9), REFUSE),
        (X86, 62, (0, 9), REFUSE),
        (X86, 62, (0xFFFFFFFF, 9), REFUSE),
        (ARM, 129, (77, 9), ALLOW),
        (ARM, 131, (78, 78, 9), REFUSE),  # tgkill
        (X86, 257, (0, 0, 0o1000), REFUSE),  # openat O_TRUNC, read only
        (X86, 257, (0, 0, 0o1101), ALLOW),
        (X86, 2, (0, 0o1000), REFUSE),  # open
        (ARM, 56, (0, 0, 0), ALLOW),
        (X86, 72, (3, 8), REFUSE),  # fcntl F_SETOWN
        (X86, 72, (3, 3), ALLOW),
        (ARM, 29, (0, 0x5412), REFUSE),  # ioctl TIOCSTI
        (X86, 302, (0, 7, 0), ALLOW),  # prlimit64 that only reads
        (X86, 302, (0, 7, 1 << 32), REFUSE),
        (X86, 302, (0, 7, 1), REFUSE),
        (X86, 0x40000000, (), KILL),  # x32
        (X86, 9999, (), REFUSE),
        (X86, 73, (0, 2), REFUSE),  # flock
        (ARM, 32, (0, 2), REFUSE),
        (X86, 285, (3, 1, 0, 9), REFUSE),  # fallocate
        (ARM, 47, (3, 1, 0, 9), REFUSE),
    ],
)
def test_filter_verdicts(machine, number, arguments, verdict):
  name, arch = machine
  code = seccomp.assemble(77, name)
  assert _filter(code, arch, number, *arguments) == verdict
  assert _filter(code, 0x40000003, number, *arguments) == KILL


def test_a_machine_without_a_table_is_refused():
  with pytest.raises(ValueError, match='use the monty backend'):
    seccomp.assemble(1, 'riscv64')
