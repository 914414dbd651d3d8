r"""Reading and comparing numbers as people and models write them.

Integers, decimals, fractions, mixed numbers, LaTeX fractions, powers of ten,
thousands separators, currency and percent signs.  What it leaves out: algebra,
units in plain words, and the meaning of a percent sign, which is dropped:
50% equals 50 and not 0.5.  Invariant: a text is read as one exact fraction or
not at all, in time that does not depend on the size of the number.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
_MAX_EXPONENT = 300
_TOLERANCE = Fraction(1, 10**9)

_DECIMAL = r'(?:\d+(?:\.\d*)?|\.\d+)'
_GROUPED = re.compile(r'\d{1,3}(?:,\d{3})+(?:\.\d+)?')
_NUMBER = re.compile(rf'({_DECIMAL})(?:[eE]([+-]?\d{{1,4}}))?')
_POWER = re.compile(
    rf'({_DECIMAL})(?:\\times|\\cdot|\*|x|×)10\^(?:\{{([+-]?\d{{1,4}})\}}|(\d))'
)
_RATIO = re.compile(rf'([+-]?{_DECIMAL})/([+-]?{_DECIMAL})')
_FRAC = re.compile(
    r'(\d+)?\\[dtc]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))'
)
_MIXED = re.compile(r'(\d+) (\d+) ?/ ?(\d+)')
_NAMED = re.compile(r'^[A-Za-z]\w{0,15} ?= ?')
_TEXT = re.compile(r'\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}')
_WRAPPED = re.compile(r'\\boxed\s*\{(.*)\}', re.DOTALL)
# Longest first: a sign in LaTeX before its bare form.
_DROPPED = (
    r'\left', r'\right', r'\$', r'\%', r'\!', r'\,', r'\;', r'\:',
    r'^{\circ}', r'^\circ', '$', '€', '£', '¥', '%', '°',
)  # fmt: skip


def normalize(text: str) -> str:
  """What is left of a number's text without signs, spacing and units."""
  text = text.strip()
  wrapped = _WRAPPED.fullmatch(text)
  if wrapped:
    text = wrapped.group(1)
  text = _TEXT.sub('', text).replace('−', '-').replace('{,}', ',')
  for mark in _DROPPED:
    text = text.replace(mark, '')
  text = _NAMED.sub('', ' '.join(text.split()))
  return text.removesuffix('.').strip()


def parse_number(text: str | int | float) -> Fraction | None:
  """The number that a text is, exactly; None when it is not one number.

  Args:
    text: As written, or a number already (a float is its decimal repr).
  """
  if isinstance(text, int):
    return Fraction(text)
  text = str(text).strip()
  if len(text) > MAX_CHARS:  # before anything is read, let alone converted
    return None
  text = normalize(text)
  sign = 1
  while text[:1] in ('+', '-'):
    sign = -sign if text[0] == '-' else sign
    text = text[1:].strip()
  value = _unsigned(text)
  return None if value is None else sign * value


def _unsigned(text: str) -> Fraction | None:
  if ' ' in text:
    mixed = _MIXED.fullmatch(text)
    if mixed:
      return _mixed(mixed.group(1), mixed.group(2), mixed.group(3))
    text = text.replace(' ', '')
    # Spaces may surround operators; two numbers side by side are not one.
    if not re.search(r'[/\\*×x]', text):
      return None
  frac = _FRAC.fullmatch(text)
  if frac:
    whole, top, top_digit, bottom, bottom_digit = frac.groups()
    return _mixed(whole or '0', top or top_digit, bottom or bottom_digit)
  ratio = _RATIO.fullmatch(_ungrouped(text))
  if ratio:
    return _mixed('0', ratio.group(1), ratio.group(2))
  power = _POWER.fullmatch(text)
  if power:
    return _scaled(power.group(1), power.group(2) or power.group(3))
  number = _NUMBER.fullmatch(_ungrouped(text))
  return _scaled(*number.groups()) if number else None


def _ungrouped(text: str) -> str:
  """Without thousands separators where they stand at thousands."""
  parts = text.split('/')
  return '/'.join(
      part.replace(',', '') if _GROUPED.fullmatch(part) else part
      for part in parts
  )


def _scaled(digits: str, exponent: str | None) -> Fraction | None:
  power = int(exponent or 0)
  if abs(power) > _MAX_EXPONENT:
    return None
  return Fraction(digits) * Fraction(10) ** power


def _mixed(whole: str, top: str, bottom: str) -> Fraction | None:
  """whole + top / bottom; None when a part is no number or bottom is 0."""
  parts = [parse_number(part) for part in (whole, top, bottom)]
  if None in parts or parts[2] == 0:
    return None
  return parts[0] + parts[1] / parts[2]


def same_number(left: Fraction, right: Fraction) -> bool:
  """Equality; to nine digits unless both are whole.

  The tolerance is for decimals that a program printed (0.30000000000000004).
  """
  if left == right:
    return True
  if left.denominator == right.denominator == 1:
    return False
  return abs(left - right) <= _TOLERANCE * max(abs(left), abs(right))
