"""Each estimator against a plain loop over episodes, turns and tokens."""

import jax
import numpy as np
import pytest

from agent_rl_jax.algorithms import advantages
from tests import algorithm_batches as batches

GAMMA, LAM, HIGH = 0.9, 0.8, 0.7
EPSILON = 1e-6


@pytest.fixture(autouse=True)
def double():
  with jax.enable_x64(True):
    yield


class Token:
  """One sampled token of an episode."""

  def __init__(self, row, column, turn):
    self.row, self.column, self.turn = row, column, turn


def episodes_of(batch):
  """{episode: its tokens in order}, of valid episodes."""
  found = {}
  rows, length = batch.action_mask.shape
  for row in range(rows):
    if batch.valid[row]:
      tokens = found.setdefault(int(batch.episode[row]), [])
      for column in range(length):
        if batch.action_mask[row, column]:
          turn = int(batch.turn[row, column])
          tokens.append(Token(row, column, turn))
  for tokens in found.values():
    tokens.sort(key=lambda token: (token.turn, token.column))
  return found


def row_of(batch, episode):
  return next(
      row
      for row in range(len(batch.valid))
      if batch.valid[row] and batch.episode[row] == episode
  )


def per_episode(batch, values):
  """The values of one row of each valid episode."""
  return {e: float(values[row_of(batch, e)]) for e in episodes_of(batch)}


def mates(batch, episode):
  group = batch.group[row_of(batch, episode)]
  return [
      e for e in episodes_of(batch) if batch.group[row_of(batch, e)] == group
  ]


def std(values):
  return np.std(values, ddof=1) if len(values) > 1 else 0.0


def normalized(values, index, use_std):
  """values[index] against all of values; 0 without a spread."""
  if len(values) < 2 or max(values) - min(values) <= 1e-6:
    return 0.0
  centered = values[index] - np.mean(values)
  return centered / (std(values) + EPSILON) if use_std else centered


def in_group(batch, values, use_std=False):
  """{episode: value normalized in its group}."""
  result = {}
  for episode in values:
    others = mates(batch, episode)
    result[episode] = normalized(
        [values[e] for e in others], others.index(episode), use_std
    )
  return result


def rewards_of(batch, tokens, episode):
  """Token rewards: turn rewards at turn ends, the rest at the end."""
  rewards = np.zeros(len(tokens))
  row = row_of(batch, episode)
  for i, token in enumerate(tokens):
    if i + 1 == len(tokens) or tokens[i + 1].turn != token.turn:
      rewards[i] = batch.turn_rewards[row, token.turn]
  if len(tokens):
    rewards[-1] += batch.returns[row] - rewards.sum()
  return rewards


def place(batch, per_token):
  """[B, T] from {episode: a number or one per token}."""
  result = np.zeros(batch.action_mask.shape)
  for episode, tokens in episodes_of(batch).items():
    values = np.broadcast_to(per_token[episode], (len(tokens),))
    for token, value in zip(tokens, values, strict=True):
      result[token.row, token.column] = value
  return result


def whitened(batch, values):
  """Over all sampled tokens of valid rows."""
  mask = batch.action_mask & batch.valid[:, None]
  chosen = values[mask]
  result = np.zeros_like(values)
  if len(chosen) > 1 and np.ptp(chosen) > 1e-6:
    result[mask] = (chosen - chosen.mean()) / np.sqrt(
        np.var(chosen, ddof=1) + 1e-8
    )
  return result


def grpo(batch, scores):
  return place(batch, in_group(batch, per_episode(batch, batch.returns), True))


def dr_grpo(batch, scores):
  return place(batch, in_group(batch, per_episode(batch, batch.returns)))


def rloo(batch, scores):
  values = per_episode(batch, batch.returns)
  result = {}
  for episode, value in values.items():
    others = [values[e] for e in mates(batch, episode) if e != episode]
    result[episode] = value - np.mean(others) if others else 0.0
  return place(batch, result)


def opo(batch, scores):
  values = per_episode(batch, batch.returns)
  lengths = {e: len(tokens) for e, tokens in episodes_of(batch).items()}
  result = {}
  for episode, value in values.items():
    group = mates(batch, episode)
    scores = [values[e] for e in group]
    total = sum(lengths[e] for e in group)
    baseline = sum(values[e] * lengths[e] for e in group) / max(total, 1)
    flat = len(group) < 2 or max(scores) - min(scores) <= 1e-6
    result[episode] = 0.0 if flat else value - baseline
  return place(batch, result)


def gpg(batch, scores):
  values = per_episode(batch, batch.returns)
  nonzero = sum(value != 0 for value in values.values())
  scale = len(values) / max(nonzero, 1)
  centered = in_group(batch, values)
  return place(batch, {e: scale * v for e, v in centered.items()})


def reinforce_plus_plus_baseline(batch, scores):
  values = per_episode(batch, batch.returns)
  result = {}
  for episode, value in values.items():
    group = mates(batch, episode)
    mean = np.mean([values[e] for e in group]) if len(group) > 1 else 0.0
    result[episode] = value - mean
  return whitened(batch, place(batch, result))


def gdpo(batch, scores):
  total = {episode: 0.0 for episode in episodes_of(batch)}
  for column, weight in enumerate((1.0, 0.5)):
    values = per_episode(batch, batch.components[:, column])
    for episode, value in in_group(batch, values, True).items():
      total[episode] += weight * value
  return whitened(batch, place(batch, total))


def reinforce(batch, scores):
  values = per_episode(batch, batch.returns)
  return place(batch, {e: value - 0.3 for e, value in values.items()})


def to_go(batch, gamma):
  result = {}
  for episode, tokens in episodes_of(batch).items():
    rewards = rewards_of(batch, tokens, episode)
    running = 0.0
    values = np.zeros(len(tokens))
    for i in reversed(range(len(tokens))):
      running = rewards[i] + gamma * running
      values[i] = running
    result[episode] = values
  return result


def reward_to_go(batch, scores):
  return place(batch, to_go(batch, GAMMA))


def reinforce_plus_plus(batch, scores):
  return whitened(batch, place(batch, to_go(batch, GAMMA)))


def remax(batch, scores):
  values = to_go(batch, 1.0)
  for episode in values:
    values[episode] = values[episode] - batch.baseline[row_of(batch, episode)]
  return place(batch, values)


def gae(batch, scores):
  result = {}
  for episode, tokens in episodes_of(batch).items():
    rewards = rewards_of(batch, tokens, episode)
    values = [scores.values[token.row, token.column] for token in tokens]
    running = following = 0.0
    advantage = np.zeros(len(tokens))
    for i in reversed(range(len(tokens))):
      delta = rewards[i] + GAMMA * following - values[i]
      running = delta + GAMMA * LAM * running
      following = values[i]
      advantage[i] = running
    result[episode] = advantage
  return whitened(batch, place(batch, result))


def bi_level_gae(batch, scores):
  result = {}
  for episode, tokens in episodes_of(batch).items():
    rewards = rewards_of(batch, tokens, episode)
    values = [scores.values[token.row, token.column] for token in tokens]
    ends = [
        i
        for i in range(len(tokens))
        if i + 1 == len(tokens) or tokens[i + 1].turn != tokens[i].turn
    ]
    high = {}
    running = following = 0.0
    for i in reversed(ends):
      running = rewards[i] + HIGH * following - values[i] + HIGH * LAM * running
      following = values[i]
      high[i] = running + values[i]
    advantage = np.zeros(len(tokens))
    running = following = 0.0
    for i in reversed(range(len(tokens))):
      if i in high:
        running = high[i] - values[i]
      else:
        delta = rewards[i] + GAMMA * following - values[i]
        running = delta + GAMMA * LAM * running
      following = values[i]
      advantage[i] = running
    result[episode] = advantage
  return whitened(batch, place(batch, result))


def by_turn(batch, scores, lam, use_values):
  result = {}
  for episode, tokens in episodes_of(batch).items():
    rewards = rewards_of(batch, tokens, episode)
    running = following = 0.0
    per_turn = {}
    for turn in sorted({token.turn for token in tokens}, reverse=True):
      members = [i for i, token in enumerate(tokens) if token.turn == turn]
      first = tokens[members[0]]
      value = scores.values[first.row, first.column] if use_values else 0.0
      delta = rewards[members].sum() + GAMMA * following - value
      running = delta + GAMMA * lam * running
      following = value
      per_turn[turn] = running
    result[episode] = np.array([per_turn[token.turn] for token in tokens])
  return place(batch, result)


def turn_gae(batch, scores):
  return whitened(batch, by_turn(batch, scores, LAM, True))


def turn_return(batch, scores):
  return by_turn(batch, scores, 1.0, False)


def mt_grpo(batch, scores):
  found = episodes_of(batch)
  turn, total = {}, per_episode(batch, batch.returns)
  for episode in found:
    row = row_of(batch, episode)
    turn[episode] = batch.turn_rewards[row][batch.turn_mask[row]].sum()
  outcome = in_group(batch, {e: total[e] - turn[e] for e in found}, True)
  combined = in_group(batch, total, True)
  turn = in_group(batch, turn, True)
  result = {}
  for episode, tokens in found.items():
    if len({token.turn for token in tokens}) > 1:
      result[episode] = np.array(
          [
              outcome[episode] + 0.5 * turn[episode] * (token.turn == 0)
              for token in tokens
          ]
      )
    else:
      result[episode] = combined[episode]
  return place(batch, result)


def gigpo(batch, scores):
  found = episodes_of(batch)
  episode_part = in_group(batch, per_episode(batch, batch.returns), True)
  steps = {}
  for episode in found:
    row = row_of(batch, episode)
    gained = np.zeros(batch.turn_mask.shape[1])
    tokens = found[episode]
    for token, reward in zip(
        tokens, rewards_of(batch, tokens, episode), strict=True
    ):
      gained[token.turn] += reward
    running = 0.0
    for turn in reversed(range(len(gained))):
      if batch.turn_mask[row, turn]:
        running = gained[turn] + GAMMA * running
        anchor = batch.anchor[row, turn]
        key = (batch.group[row], anchor) if anchor >= 0 else None
        steps[episode, turn] = key, running
  result = {}
  for episode, tokens in found.items():
    values = []
    for token in tokens:
      key, _ = steps[episode, token.turn]
      members = [step for step in steps if steps[step][0] == key]
      step_part = 0.0
      if key is not None:
        step_part = normalized(
            [steps[step][1] for step in members],
            members.index((episode, token.turn)),
            True,
        )
      values.append(episode_part[episode] + 0.5 * step_part)
    result[episode] = np.array(values)
  return place(batch, result)


TWINS = {
    'reinforce': reinforce,
    'reward_to_go': reward_to_go,
    'reinforce_plus_plus': reinforce_plus_plus,
    'reinforce_plus_plus_baseline': reinforce_plus_plus_baseline,
    'rloo': rloo,
    'remax': remax,
    'grpo': grpo,
    'dr_grpo': dr_grpo,
    'gdpo': gdpo,
    'opo': opo,
    'gpg': gpg,
    'gae': gae,
    'bi_level_gae': bi_level_gae,
    'turn_gae': turn_gae,
    'turn_return': turn_return,
    'mt_grpo': mt_grpo,
    'gigpo': gigpo,
}


def test_every_estimator_has_a_twin():
  assert TWINS.keys() == advantages.ADVANTAGES.keys()


@pytest.mark.parametrize('markov', [False, True], ids=['full', 'markov'])
@pytest.mark.parametrize('name', TWINS)
def test_twin(name, markov):
  for seed in range(12):
    batch, scores = batches.random_batch(seed, markov)
    actual = batches.every_advantage(batch, scores)[name].advantages
    expected = TWINS[name](batch, scores)
    np.testing.assert_allclose(actual, expected, atol=1e-8, err_msg=str(seed))
