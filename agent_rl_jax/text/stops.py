"""Where a sampled turn ends: one table for the device, one search for the host.

Stop strings are matched on the bytes of the tokens (Aho and Corasick 1975), so
it does not matter how the policy cut them into tokens; stop ids match at once.
A turn ends with the token that completes the first match, anywhere inside it,
and that whole token belongs to the turn.  Invariant: the table reaches its last
state at the token at which a plain search over the decoded bytes first finds a
stop string.  A token without bytes (a mark) breaks a match in progress.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from agent_rl_jax.text import vocabulary


@dataclasses.dataclass(frozen=True)
class Stop:
  """How a turn ended.

  Attributes:
    index: Position of the token that ended it.
    string: The stop string found, None when a stop id ended it.
    rest: Bytes that the token holds beyond the match: reported, never acted on.
  """

  index: int
  string: str | None
  rest: bytes = b''


def _byte_table(stop_strings: Sequence[str]) -> np.ndarray:
  """Returns the next state for each (state, byte), int16 [Q, 256].

  State 0 is the start, the last one means matched and is never left.
  """
  patterns = [text.encode() for text in stop_strings]
  if not all(patterns):
    raise ValueError(
        f'stop_strings={tuple(stop_strings)!r}: an empty stop string would end'
        ' every turn at once; drop it'
    )
  children: list[dict[int, int]] = [{}]
  ends = {0: False}
  for pattern in patterns:
    node = 0
    for byte in pattern:
      if byte not in children[node]:
        children[node][byte] = len(children)
        ends[len(children)] = False
        children.append({})
      node = children[node][byte]
    ends[node] = True

  # Breadth first: a node's row is its fallback's row with its own children
  # written over it; the fallback is shallower, so it is complete.
  size = len(children)
  table = np.zeros((size, 256), np.int64)
  fallback = [0] * size
  queue = collections.deque([0])
  while queue:
    node = queue.popleft()
    if node:
      table[node] = table[fallback[node]]
      ends[node] |= ends[fallback[node]]
    for byte, child in children[node].items():
      fallback[child] = int(table[node, byte]) if node else 0
      table[node, byte] = child
      queue.append(child)

  # All matching nodes become one last state.
  live = [node for node in range(size) if not ends[node]]
  if len(live) + 1 > np.iinfo(np.int16).max:
    raise ValueError(
        f'stop_strings need {len(live) + 1} states, more than int16 holds; use'
        ' fewer or shorter ones'
    )
  renamed = np.full(size, len(live), np.int16)
  renamed[live] = np.arange(len(live), dtype=np.int16)
  matched = np.full((1, 256), len(live), np.int16)
  return np.concatenate([renamed[table[live]], matched])


def stop_table(
    tokenizer: vocabulary.Tokenizer,
    stop_ids: Iterable[int],
    stop_strings: Sequence[str],
    vocab_size: int | None = None,
) -> np.ndarray:
  """Returns the matcher as a table of next states, int16 [Q, V].

  Args:
    tokenizer: Gives each token's bytes.
    stop_ids: Ids that end a turn at once.
    stop_strings: Strings that end a turn; none may be empty.
    vocab_size: V, when the policy's vocabulary is padded beyond the
      tokenizer's; the ids beyond match nothing.

  Returns:
    `table[state, token]`: state 0 is the start of a turn, the last state means
    that the turn has ended and is never left.

  Raises:
    ValueError: An empty stop string, or a stop id outside the vocabulary.
  """
  size = tokenizer.vocab_size if vocab_size is None else vocab_size
  if size < tokenizer.vocab_size:
    raise ValueError(
        f'vocab_size={size} is less than the tokenizer holds'
        f' ({tokenizer.vocab_size})'
    )
  step = _byte_table(stop_strings)
  states = len(step)
  pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
  lengths = np.array([len(piece) for piece in pieces])
  order = np.argsort(-lengths, kind='stable')  # longest first
  start = np.arange(states, dtype=np.int16)[:, None]
  table = np.repeat(start, size, axis=1)
  flat = np.frombuffer(b''.join(pieces), np.uint8)
  first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
  for at in range(int(lengths.max())):
    longer = order[: np.searchsorted(-lengths[order], -at, side='left')]
    table[:, longer] = step[table[:, longer], flat[first[longer] + at]]
  table[:-1, : len(pieces)][:, lengths == 0] = 0
  table[:-1, len(pieces) :] = 0
  for index in stop_ids:
    if not 0 <= index < size:
      raise ValueError(f'stop id {index} is outside the vocabulary of {size}')
    table[:, index] = states - 1
  return table


def find_stop(
    tokenizer: vocabulary.Tokenizer,
    ids: Sequence[int] | np.ndarray,
    stop_ids: Iterable[int],
    stop_strings: Sequence[str],
) -> Stop | None:
  """Returns how the turn `ids` ended, None when no stop is in it.

  Of stop strings that are complete at the same byte the longest is named.
  """
  stop_ids = frozenset(stop_ids)
  step = _byte_table(stop_strings)
  state, last, text = 0, len(step) - 1, bytearray()
  for index, token in enumerate(map(int, ids)):
    if token in stop_ids:
      return Stop(index, None)
    piece = tokenizer.token_bytes(token)
    if not piece:
      state = 0
      text.clear()
    for at, byte in enumerate(piece):
      text.append(byte)
      state = int(step[state, byte])
      if state == last:
        found = max(
            (s for s in stop_strings if text.endswith(s.encode())), key=len
        )
        return Stop(index, found, piece[at + 1 :])
  return None
