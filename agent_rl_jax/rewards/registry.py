"""Rewards by name.

A new reward is one file with one function, and one entry here.  The values
make a reward, so that one with memory is fresh in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_rl_jax.rewards.answer import answer
from agent_rl_jax.rewards.efficiency import call_cost, length_cost
from agent_rl_jax.rewards.environment import environment
from agent_rl_jax.rewards.execution import execution
from agent_rl_jax.rewards.format import format_reward
from agent_rl_jax.rewards.reward import Reward, per_episode

REWARDS: Mapping[str, Callable[[], Reward]] = {
    'answer': lambda: per_episode(answer),
    'format': lambda: per_episode(format_reward),
    'execution': lambda: per_episode(execution),
    'environment': lambda: per_episode(environment),
    'call_cost': lambda: per_episode(call_cost),
    'length_cost': lambda: per_episode(length_cost),
}
