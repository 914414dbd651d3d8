"""Named randomness for the host: a generator is a function of its names.

Leaves out everything drawn on the device, where keys fold in the same way.
Invariant: no draw depends on how many draws were made before it, so item i of
a data set is the same whoever asks for it, and in whatever order.
"""

from __future__ import annotations

import hashlib

import numpy as np


def named_generator(*names: int | str) -> np.random.Generator:
  """Generator of the stream called `names` (any mix of ints and strings)."""
  digest = hashlib.blake2b(repr(names).encode('utf-8'), digest_size=16).digest()
  return np.random.Generator(
      np.random.Philox(key=np.frombuffer(digest, dtype='<u8'))
  )
