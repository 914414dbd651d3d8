"""Sandboxes that the tests of hostile code share, one for each module."""

import pytest

from tests.failures.hostile import make


@pytest.fixture(scope='module', params=['process', 'process-bare', 'monty'])
def sandbox(request):
  made = make(request.param)
  yield made
  made.close()


@pytest.fixture(scope='module', params=['process', 'process-bare'])
def cpython(request):
  made = make(request.param)
  yield made
  made.close()
