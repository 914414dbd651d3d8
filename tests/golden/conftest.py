"""Fixtures of the golden tests."""

import jax
import pytest


@pytest.fixture
def double():
  """In float64 where a test asks for it, as most references are."""
  with jax.enable_x64(True):
    yield
