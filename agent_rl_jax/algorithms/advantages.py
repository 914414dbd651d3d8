"""The table of advantage estimators.

An estimator is a pure function (batch, scores, state, options) -> Advantages;
to add one, write it in a file of its own and enter it here.
"""

from __future__ import annotations

from collections.abc import Callable

from agent_rl_jax.algorithms import group
from agent_rl_jax.algorithms.options import AdvantageOptions
from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch

Estimator = Callable[
    [TrajectoryBatch, Scores, dict | None, AdvantageOptions], Advantages
]

ADVANTAGES: dict[str, Estimator] = {
    'grpo': group.grpo,
}
