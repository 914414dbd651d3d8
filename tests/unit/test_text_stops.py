"""Stop matching: hand-worked tables, and a plain search as the judge."""

import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from agent_rl_jax.text import stops, vocabulary


class Listed(vocabulary.Tokenizer):
  """A vocabulary written out; the last id is a mark."""

  def __init__(self, pieces):
    super().__init__([*pieces, b''], {'<m>': len(pieces)}, 'listed')

  def encode(self, text):
    return [self._bytes.index(c.encode()) for c in text]


def _walk(table: np.ndarray, ids) -> int | None:
  """Position of the token at which the table reaches its last state."""
  state = 0
  for index, token in enumerate(ids):
    state = table[state, token]
    if state == len(table) - 1:
      return index
  return None


def test_hand_worked_table():
  tokenizer = Listed([b'a', b'b', b'ab', b'ca', b'xabx', b'aa'])
  table = stops.stop_table(tokenizer, (), ('ab',))
  assert table.dtype == np.int16
  np.testing.assert_array_equal(
      table,
      [
          # a  b  ab ca xabx aa <m>
          [1, 0, 2, 1, 2, 1, 0],  # nothing yet
          [1, 2, 2, 1, 2, 1, 0],  # an 'a'
          [2, 2, 2, 2, 2, 2, 2],  # matched
      ],
  )


def test_stop_ids_match_at_once_and_padding_never():
  tokenizer = Listed([b'a', b'b'])
  table = stops.stop_table(tokenizer, (2,), (), vocab_size=5)
  np.testing.assert_array_equal(table, [[0, 0, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_overlapping_strings_fall_back():
  tokenizer = Listed([bytes([c]) for c in b'abcd'])
  table = stops.stop_table(tokenizer, (), ('abcd', 'bd', 'cc'))
  assert _walk(table, tokenizer.encode('abd')) == 2
  assert _walk(table, tokenizer.encode('abcc')) == 3
  assert _walk(table, tokenizer.encode('abcab')) is None
  assert _walk(table, tokenizer.encode('aabcabcd')) == 7
  inside = stops.stop_table(tokenizer, (), ('abab', 'ba'))
  assert _walk(inside, tokenizer.encode('aba')) == 2


def test_the_rest_of_the_last_token_is_reported():
  tokenizer = Listed([b'a', b'\n``', b'`\n\nOut', b'`'])
  found = stops.find_stop(tokenizer, [0, 1, 2], (), ('\n```\n',))
  assert found == stops.Stop(2, '\n```\n', b'\nOut')
  assert stops.find_stop(tokenizer, [0, 4], (4,), ('x',)) == stops.Stop(1, None)
  assert stops.find_stop(tokenizer, [0, 1], (4,), ('x',)) is None


def test_a_mark_breaks_a_match():
  tokenizer = Listed([b'a', b'b'])
  table = stops.stop_table(tokenizer, (), ('ab',))
  assert _walk(table, [0, 2, 1]) is None
  assert stops.find_stop(tokenizer, [0, 2, 1], (), ('ab',)) is None


def test_bad_stops_are_named():
  tokenizer = Listed([b'a'])
  with pytest.raises(ValueError, match='empty stop string'):
    stops.stop_table(tokenizer, (), ('a', ''))
  with pytest.raises(ValueError, match='stop id 9'):
    stops.stop_table(tokenizer, (9,), ())
  with pytest.raises(ValueError, match='vocab_size=1'):
    stops.stop_table(tokenizer, (), (), vocab_size=1)


LETTERS = st.text('abé', min_size=1, max_size=4)


@hypothesis.given(
    pieces=st.lists(
        st.lists(st.sampled_from(list('abé'.encode())), min_size=1, max_size=5),
        min_size=1,
        max_size=8,
    ),
    strings=st.lists(LETTERS, min_size=1, max_size=4),
    picks=st.lists(st.integers(0, 99), max_size=20),
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_the_table_agrees_with_a_plain_search(pieces, strings, picks):
  tokenizer = Listed([bytes(piece) for piece in pieces])
  ids = [pick % tokenizer.vocab_size for pick in picks]
  expected = None
  text = b''
  for index, token in enumerate(ids):
    piece = tokenizer.token_bytes(token)
    text = text + piece if piece else b''
    ends = [
        text.find(s.encode()) + len(s.encode())
        for s in strings
        if s.encode() in text
    ]
    if ends:
      expected = (index, text[min(ends) :])
      break
  table = stops.stop_table(tokenizer, (), strings)
  found = stops.find_stop(tokenizer, ids, (), strings)
  assert _walk(table, ids) == (expected and expected[0])
  assert (found and (found.index, found.rest)) == expected


def test_a_real_vocabulary_takes_no_time():
  rng = np.random.Generator(np.random.Philox(key=1))
  pieces = [
      rng.integers(97, 123, n, np.uint8).tobytes()
      for n in rng.integers(1, 12, 49_000)
  ]
  start = time.perf_counter()
  table = stops.stop_table(Listed(pieces), (3,), ('\n```\n', '</tool_call>'))
  assert table.shape == (17, 49_001)
  assert time.perf_counter() - start < 2
