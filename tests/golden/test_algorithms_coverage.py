"""Every golden case that is kept is used by a test."""

import algorithm_cases as cases
import test_algorithms_advantages  # noqa: F401
import test_algorithms_aggregation  # noqa: F401
import test_algorithms_corrections  # noqa: F401
import test_algorithms_filters  # noqa: F401
import test_algorithms_gigpo  # noqa: F401
import test_algorithms_losses  # noqa: F401
import test_algorithms_rewards  # noqa: F401


def test_every_case_is_claimed():
  assert set(cases.CASES) - cases.CLAIMED == set()
