"""A greedy episode beside its group: same chance, and nobody is disturbed."""

import pytest

from agent_rl_jax.rollout.live import Request
from agent_rl_jax.rollout.slots import Purpose
from tests import toys


def _requests(greedy):
  out = []
  for group, task in enumerate(toys.tasks(4)):
    first = 100 + 3 * group
    out += [Request(task, first + i, group) for i in range(3)]
    if greedy:
      out.append(Request(task, first, group, greedy=True))
  return out


@pytest.fixture(scope='module')
def both():
  engine, params = toys.engine()
  play = lambda requests, **options: engine.rollout(
      params, requests, purpose=Purpose.TRAIN, **options
  )[0]
  requests = _requests(greedy=True)
  beside = play(requests)
  alone = play(_requests(greedy=False))
  pairs = list(zip(requests, beside, strict=True))
  sampled = [e for r, e in pairs if not r.greedy]
  greedy = [e for r, e in pairs if r.greedy]
  # The same episodes with nothing sampled: same purpose, same environments.
  only = play(
      [Request(r.task, r.uid, r.group) for r in requests if r.greedy],
      temperature=0.0,
  )
  return sampled, greedy, alone, only


def test_sampled_episodes_are_what_they_are_without_it(both):
  sampled, _, alone, _ = both
  assert toys.fingerprint(sampled) == toys.fingerprint(alone)


def test_it_is_greedy_in_the_environment_of_the_first_of_its_group(both):
  sampled, greedy, _, only = both
  # The toy's observations depend on the environment's seed.
  assert any(len(e.turns) > 1 for e in greedy)
  assert toys.fingerprint(greedy) == toys.fingerprint(only)
  first = {e.uid: toys.fingerprint([e]) for e in sampled}
  assert any(toys.fingerprint([e]) != first[e.uid] for e in greedy)
