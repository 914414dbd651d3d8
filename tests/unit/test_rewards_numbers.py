"""Numbers as they are written, against hand-worked values."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl_jax.rewards.answer import same_answer
from agent_rl_jax.rewards.numbers import parse_number, same_number


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('72', 72),
        (72, 72),
        (72.5, Fraction(145, 2)),
        ('-7', -7),
        ('−7', -7),
        ('+7', 7),
        ('72.', 72),
        ('.5', Fraction(1, 2)),
        ('3.25', Fraction(13, 4)),
        ('1,234,567', 1234567),
        ('1{,}234', 1234),
        ('12,345.5', Fraction(24691, 2)),
        ('$12.50', Fraction(25, 2)),
        (r'\$1,200', 1200),
        ('-$5', -5),
        ('€5', 5),
        ('50%', 50),
        (r'50\%', 50),
        ('3/4', Fraction(3, 4)),
        ('3 / 4', Fraction(3, 4)),
        ('-3/4', Fraction(-3, 4)),
        ('1,000/3', Fraction(1000, 3)),
        (r'\frac{3}{4}', Fraction(3, 4)),
        (r'\dfrac{3}{4}', Fraction(3, 4)),
        (r'-\frac{3}{4}', Fraction(-3, 4)),
        (r'\frac34', Fraction(3, 4)),
        (r'\frac{-3}{4}', Fraction(-3, 4)),
        (r'1\frac{1}{2}', Fraction(3, 2)),
        ('1 1/2', Fraction(3, 2)),
        ('1e3', 1000),
        (r'1.2\times10^{3}', 1200),
        (r'3 \times 10^2', 300),
        (r'72\text{ dollars}', 72),
        (r'90^\circ', 90),
        ('$x = 5$', 5),
        (r'\boxed{42}', 42),
    ],
)
def test_readings(text, value):
  assert parse_number(text) == value


@pytest.mark.parametrize(
    'text',
    [
        '',
        'seven',
        '72 dollars',
        '1 2',
        '12,34',
        '1,2,3',
        '3/0',
        r'\frac{1}{0}',
        '1.2.3',
        '3:4',
        '(1,2)',
        'nan',
        'inf',
        '1e9999',
        '9' * 201,
        '72' + ' ' * 300 + '5',
        '1/2/3',
        '--',
    ],
)
def test_not_numbers(text):
  begin = time.monotonic()
  assert parse_number(text) is None
  # Bad ones would take minutes.
  assert time.monotonic() - begin < 20


@given(st.integers(-(10**30), 10**30))
def test_integers_survive_any_spelling(n):
  for text in (str(n), f'{n:,}', f'${n:,}$', rf'\boxed{{{n}}}', f' {n}. '):
    assert parse_number(text) == n


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_survive(top, bottom):
  value = Fraction(top, bottom)
  assert parse_number(f'{top}/{bottom}') == value
  assert parse_number(rf'\frac{{{top}}}{{{bottom}}}') == value


@given(st.text(max_size=250))
def test_never_raises(text):
  parse_number(text)


def test_sameness():
  assert same_number(Fraction('0.30000000000000004'), Fraction('0.3'))
  assert not same_number(Fraction('0.3001'), Fraction('0.3'))
  # Whole numbers are never close enough.
  assert not same_number(Fraction(10**12), Fraction(10**12 + 1))


def test_same_answer():
  assert same_answer('1,234', '1234') and same_answer('1234.0', 1234)
  assert same_answer('0.5', r'\frac12') and same_answer('50', '50%')
  assert not same_answer('0.5', '50%')
  assert not same_answer('1235', '1234') and not same_answer('', '0')
  assert not same_answer('many', '5')
  # A gold answer that is no number compares as text.
  assert same_answer(r'\text{}Tuesday', 'tuesday ')
  assert not same_answer('5', 'tuesday')
