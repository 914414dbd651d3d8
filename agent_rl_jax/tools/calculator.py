"""Exact arithmetic as a tool: numbers, + - * / // % ** and parentheses.

Parsed with `ast` and evaluated from a whitelist; nothing is ever executed.
What it leaves out: names, functions, comparisons, complex numbers.  Invariants:
every answer is exact (decimals are fractions inside) until it is printed, but
for fractional powers; no expression takes more than milliseconds, because its
length, its depth and the size of every intermediate number are bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from agent_rl_jax.tools.tool import error_result, ok_result
from agent_rl_jax.types import ToolResult

MAX_CHARS = 1000
MAX_DEPTH = 200  # a sum of 200 terms is that deep
MAX_BITS = 4096  # of any numerator or denominator: 1233 digits

_ALLOWED = re.compile(r'[0-9eE_.+\-*/%()\s]*')
_SPELLINGS = str.maketrans({'×': '*', '÷': '/', '−': '-', '·': '*'})


class CalculatorError(ValueError):
  """Why an expression has no value, worded for the model."""


def _fits(value: Fraction) -> Fraction:
  bits = max(value.numerator.bit_length(), value.denominator.bit_length())
  if bits > MAX_BITS:
    raise CalculatorError('the number is too large')
  return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
  """Exact for whole exponents, in floating point for others."""
  if exponent.denominator != 1:
    value = float(base) ** float(exponent)
    if isinstance(value, complex):
      raise CalculatorError('a negative number has no real fractional power')
    return _decimal(value)
  bits = max(base.numerator.bit_length(), base.denominator.bit_length())
  # Refused before it is computed: the result has at least this many bits.
  if (bits - 1) * abs(exponent) > MAX_BITS:
    raise CalculatorError('the number is too large')
  return base ** int(exponent)


def _decimal(value: float) -> Fraction:
  """The decimal as written: 0.1 is 1/10, not its nearest binary fraction."""
  if not math.isfinite(value):
    raise CalculatorError('the number is too large')
  return Fraction(repr(value))


_BINARY: Mapping[type, Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: Mapping[type, Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _value(node: ast.AST, depth: int) -> Fraction:
  if depth > MAX_DEPTH:
    raise CalculatorError('the expression is nested too deeply')
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    left = _value(node.left, depth + 1)
    right = _value(node.right, depth + 1)
    return _fits(Fraction(_BINARY[type(node.op)](left, right)))
  if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
    return _UNARY[type(node.op)](_value(node.operand, depth + 1))
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return _fits(Fraction(node.value))
  if isinstance(node, ast.Constant) and type(node.value) is float:
    return _fits(_decimal(node.value))
  raise CalculatorError('only numbers, + - * / // % ** and () are allowed')


def _refusal(text: str) -> str | None:
  """What is wrong with the characters of an expression, or None."""
  if not text:
    return 'the expression is empty'
  if len(text) > MAX_CHARS:
    return f'the expression is longer than {MAX_CHARS} characters'
  if '^' in text:
    return 'write powers with **, not ^'
  if re.search(r'\d,\d', text):
    return 'write numbers without thousands separators'
  bad = text[_ALLOWED.match(text).end() :]
  if bad:
    return (
        f'unexpected {bad[0]!r}: only numbers, + - * / // % ** and () are '
        'allowed'
    )
  return None


def calculate(expression: str) -> str:
  """Value of an arithmetic expression: a whole number, or a decimal.

  Args:
    expression: Python's arithmetic; × ÷ and a trailing = are understood.

  Returns:
    The exact integer when the value is whole, else the nearest float's repr.

  Raises:
    CalculatorError: There is no value; the message says why.
  """
  text = expression.translate(_SPELLINGS).strip().rstrip('=').strip()
  problem = _refusal(text)
  if problem is not None:
    raise CalculatorError(problem)
  try:
    value = _value(ast.parse(text, mode='eval').body, 1)
    if value.denominator == 1:
      return str(value.numerator)
    return repr(float(value))
  except ZeroDivisionError as e:
    raise CalculatorError('division by zero') from e
  except OverflowError as e:
    raise CalculatorError('the number is too large') from e
  except (SyntaxError, MemoryError, RecursionError) as e:
    # The parser itself gives up on some nestings.
    raise CalculatorError(f'cannot read {text[:80]!r}') from e


class Calculator:
  """The tool 'calculator': one argument, an expression."""

  spec: Mapping[str, Any] = {
      'name': 'calculator',
      'description': 'Evaluates an arithmetic expression exactly.',
      'parameters': {
          'type': 'object',
          'properties': {
              'expression': {
                  'type': 'string',
                  'description': 'For example 12*(3+4)/7.',
              }
          },
          'required': ['expression'],
      },
  }

  def __call__(
      self, arguments: Mapping[str, Any], *, deadline: float
  ) -> ToolResult:
    """Evaluates `arguments['expression']`; needs no deadline to be quick."""
    del deadline
    try:
      return ok_result(calculate(arguments['expression']))
    except CalculatorError as e:
      return error_result(str(e))
