"""From waves of tasks to one batch: filters, surplus, replay, by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from agent_rl_jax.algorithms import advantages
from agent_rl_jax.algorithms.options import AlgorithmOptions
from agent_rl_jax.batch import Scores
from agent_rl_jax.rollout.engine import Interrupted
from agent_rl_jax.train.group import Group
from agent_rl_jax.train.loop import trained_tokens
from tests.collect_cases import (
    SAMPLES,
    ScriptedEngine,
    collector,
    uids,
)

MIXED, RIGHT, WRONG = 'right wrong', 'right right', 'wrong wrong'
ROWS = 4
# First episode of a wave: (wave * 10 iterations + iteration) * 4 rows.
UID = lambda iteration, wave=0, group=0: (
    (wave * 10 + iteration) * ROWS + group * SAMPLES
)


def _shapes(collected):
  return jax.tree.map(lambda x: (x.shape, x.dtype), collected.batch)


def test_without_a_filter_it_is_one_wave_of_ordered_names():
  made, engine = collector([MIXED] * 6)
  for iteration in range(3):
    done = made.collect(None, iteration)
    assert uids(done.scored) == list(range(4 * iteration, 4 * iteration + 4))
    assert done.scored.episodes == done.played.episodes
    np.testing.assert_array_equal(done.batch.group, [0, 0, 1, 1])
    np.testing.assert_array_equal(done.batch.weight, 1)
    assert done.batch.baseline is None and not done.notes
    assert done.batch.fresh is None
    told = [m for m in done.metrics if m.startswith(('collect', 'replay'))]
    assert told == ['collect/return_std']
  assert engine.waves == 3


def test_dynamic_sampling_plays_on_and_keeps_the_surplus_for_later():
  scripts = [RIGHT, MIXED]  # iteration 0: one is missing
  scripts += [MIXED, MIXED]  # its second wave brings one too many
  scripts += [WRONG]  # iteration 1 begins with that one and needs another
  scripts += [RIGHT, MIXED]
  made, engine = collector(scripts, filter__name='dynamic_sampling')
  first = made.collect(None, 0)
  assert uids(first.scored) == [2, 3, *(UID(0, 1) + i for i in range(2))]
  assert len(first.played.episodes) == 8
  assert first.metrics['collect/waves'] == 2
  assert first.metrics['collect/kept_fraction'] == 3 / 4
  assert first.metrics['collect/surplus'] == len(made.kept.surplus) == 1
  assert first.metrics['collect/missing_groups'] == 0
  # What was played tells how good the policy is, and not what was kept.
  assert first.metrics['episode/accuracy'] == 5 / 8
  np.testing.assert_allclose(
      first.metrics['collect/return_std'], 3 / 4 * np.sqrt(0.5)
  )

  second = made.collect(None, 1)
  old, new = UID(0, 1, group=1), UID(1, 1, group=1)
  assert uids(second.scored) == [old, old + 1, new, new + 1]
  np.testing.assert_array_equal(second.batch.policy_version[:, 0], [0, 0, 1, 1])
  np.testing.assert_array_equal(second.batch.group, [0, 0, 1, 1])
  assert made.kept.surplus == ()
  assert _shapes(first) == _shapes(second)
  names = [r.uid for wave in engine.requests for r in wave]
  assert len(set(names)) == len(names) == 14


def test_surplus_that_would_do_does_not_stop_the_policy_from_being_measured():
  made, engine = collector([MIXED], filter__name='dynamic_sampling')
  kept = dataclasses.replace(made.kept)
  groups = _groups('abc')
  made.kept = dataclasses.replace(kept, surplus=groups[:2])
  done = made.collect(None, 5)
  assert engine.waves == 1 and done.metrics['collect/waves'] == 1
  # Oldest first; the new one waits.
  assert uids(done.scored) == [1000, 1001, 1100, 1101]
  assert [group.version for group in made.kept.surplus] == [5]
  assert len(done.played.episodes) == SAMPLES


def test_surplus_goes_before_replay_and_is_gone_after_an_iteration():
  made, _ = collector(
      [WRONG, *[MIXED] * 20],
      train__prompts=4,
      filter__name='dynamic_sampling',
      replay__capacity=8,
      replay__share=0.5,
  )
  surplus, share = [], []
  for iteration in range(4):
    done = made.collect(None, iteration)
    surplus.append(done.metrics['collect/surplus'])
    share.append(done.metrics['replay/share'])
    versions = done.batch.policy_version[done.batch.fresh, 0]
    assert (versions >= iteration - 1).all()
    assert done.batch.weight.all() and done.played.episodes
  # Three in four are left over; replay may have its half when they are in.
  assert surplus == [3, 1, 0, 0] and share == [0, 0.25, 0.5, 0.5]


def _groups(names, version=0):
  scratch, _ = collector([MIXED] * len(names), train__prompts=len(names))
  done = scratch.collect(None, version)
  out = []
  for i in range(len(names)):
    part = slice(i * SAMPLES, (i + 1) * SAMPLES)
    episodes = tuple(
        dataclasses.replace(e, uid=1000 + 100 * i + j)
        for j, e in enumerate(done.scored.episodes[part])
    )
    out.append(
        Group(
            episodes,
            done.scored.returns[part],
            done.scored.accuracy[part],
            done.scored.valid[part],
        )
    )
  return tuple(out)


def test_when_tries_run_out_rows_stay_empty_and_the_log_says_so():
  made, _ = collector(
      [RIGHT, MIXED, WRONG, WRONG, WRONG, RIGHT],
      filter__name='dynamic_sampling',
      filter__tries=2,
  )
  first = made.collect(None, 0)
  np.testing.assert_array_equal(first.batch.weight, [1, 1, 0, 0])
  np.testing.assert_array_equal(first.batch.valid, [True, True, False, False])
  np.testing.assert_array_equal(first.batch.length, [6, 6, 0, 0])
  assert first.metrics['collect/missing_groups'] == 1
  # Only the mixed one of four has a spread.
  np.testing.assert_allclose(
      first.metrics['collect/return_std'], np.sqrt(0.5) / 4
  )
  (note,) = first.notes
  assert '1 of 2 groups are missing' in note and 'kept 1 of 4' in note

  made, _ = collector([RIGHT] * 4, filter__name='dynamic_sampling',
                      filter__tries=2)  # fmt: skip
  empty = made.collect(None, 0)
  assert empty.scored.episodes == [] and not empty.batch.weight.any()
  assert empty.metrics['collect/kept_fraction'] == 0
  assert empty.metrics['episode/accuracy'] == 1
  assert _shapes(first) == _shapes(empty)


class Naming(ScriptedEngine):
  """Every turn starts from the state that its task's script ends with."""

  def rollout(self, params, requests, **kwargs):
    episodes, stats = super().rollout(params, requests, **kwargs)
    named = []
    for e in episodes:
      _, _, *states = e.task.payload['script']
      key = states[e.uid % SAMPLES].encode() if states else None
      turns = tuple(dataclasses.replace(t, state_key=key) for t in e.turns)
      named.append(dataclasses.replace(e, turns=turns))
    return named, stats


def test_gigpo_tells_how_many_steps_it_compares_and_when_it_is_none():
  scripts = [MIXED, MIXED]  # no states
  scripts += [f'{MIXED} a a', f'{MIXED} a b']  # two of four have company
  scripts += [f'{MIXED} a b', f'{MIXED} a b']  # not across groups
  made, _ = collector(scripts, Naming(), algorithm__advantage='gigpo')
  done = [made.collect(None, iteration) for iteration in range(3)]
  assert [d.metrics['gigpo/anchored_fraction'] for d in done] == [0, 0.5, 0]
  (note,) = done[0].notes
  assert 'is grpo here' in note and 'names no state' in note
  assert done[1].notes == done[2].notes == ()  # told once
  # A run resumed after two iterations told it before.
  made, _ = collector(scripts[:2], Naming(), algorithm__advantage='gigpo')
  done = made.collect(None, 2)
  assert done.metrics['gigpo/anchored_fraction'] == 0 and not done.notes

  made, _ = collector(scripts[4:], Naming(), algorithm__advantage='gigpo')
  (note,) = made.collect(None, 0).notes
  assert 'visited twice' in note and 'algorithm.similarity' in note
  made, _ = collector(
      [RIGHT] * 2,
      Naming(),
      algorithm__advantage='gigpo',
      filter__name='dynamic_sampling',
      filter__tries=1,
  )
  (note,) = made.collect(None, 0).notes
  assert 'groups are missing' in note  # no step, no word on anchors
  made, _ = collector(scripts[:2], Naming())
  done = made.collect(None, 0)
  assert not done.notes and 'gigpo/anchored_fraction' not in done.metrics


def test_the_band_is_on_the_unshaped_metric_and_failures_do_not_count():
  scripts = ['wrong long', 'dead dead', 'right dead', MIXED, MIXED, MIXED]
  made, _ = collector(
      scripts,
      filter__name='accuracy_band',
      filter__band_low=0.0,
      filter__band_high=0.8,
  )
  done = made.collect(None, 0)
  # All wrong is in this band; nobody judged is in none; 1 of 1 is above.
  assert done.metrics['collect/kept_fraction'] == 2 / 4
  assert [e.task.uid for e in done.scored.episodes[::2]] == ['0', '3']

  # Two groups of wrong answers differ in return, not in metric.
  made, _ = collector(
      ['wrong long', 'wrong tidy', MIXED, MIXED],
      filter__name='dynamic_sampling',
      overlong__penalty=1.0,
  )
  done = made.collect(None, 0)
  assert [e.task.uid for e in done.scored.episodes[::2]] == ['2', '3']


def test_ranking_by_raw_reward_takes_groups_out_of_everything():
  made, engine = collector(
      ['right long', 'wrong tidy'],
      overlong__penalty=1.0,
      filter__name='top_count',
      filter__value=1.0,
      filter__measure='sum',
      filter__smallest=True,
  )
  # Returns of 1 and 0.5, before length is charged.
  done = made.collect(None, 0)
  np.testing.assert_array_equal(done.batch.weight, [0, 0, 1, 1])
  np.testing.assert_allclose(done.batch.returns, [1, -1, 0, 0.5])

  made, engine = collector(
      [RIGHT, MIXED], filter__name='top_share', filter__value=0.5
  )
  done = made.collect(None, 0)
  assert engine.waves == 1
  np.testing.assert_array_equal(done.batch.weight, [0, 0, 1, 1])
  # Whitened over the batch, the kept group is as it would be alone.
  np.testing.assert_array_equal(done.batch.valid, [False, False, True, True])
  options = AlgorithmOptions(advantage='reinforce_plus_plus')
  scores = Scores(old_logprobs=done.batch.sampler_logprobs)
  credited = advantages.estimate(done.batch, scores, {}, options).advantages
  mask = done.batch.action_mask[2:]
  np.testing.assert_allclose(np.sum(credited[2:] * mask), 0, atol=1e-5)
  np.testing.assert_array_equal(credited[:2], 0)
  assert done.metrics['collect/kept_fraction'] == 0.5
  assert made.kept.surplus == ()
  # Six tokens a row; what the filter took out costs no update.
  assert trained_tokens(done.batch) == 12


def test_a_reward_that_fails_costs_its_group_which_is_made_up_for():
  made, _ = collector(
      ['broken right', MIXED, MIXED, MIXED], filter__name='dynamic_sampling'
  )
  done = made.collect(None, 0)
  assert [e.task.uid for e in done.scored.episodes[::2]] == ['1', '2']
  assert done.metrics['failures/unscored'] == 2
  # Of three groups; that of the failed reward has no spread.
  np.testing.assert_allclose(done.metrics['collect/return_std'], np.sqrt(0.5))


def test_overlong_shaping_and_masking():
  made, _ = collector(
      ['right long', 'wrong long'],
      overlong__penalty=0.5,
      overlong__mask=True,
  )
  done = made.collect(None, 0)
  # 16 sampled tokens are the limit; 4 are at half the limit and free.
  np.testing.assert_allclose(done.batch.returns, [1, -0.5, 0, -0.5])
  np.testing.assert_array_equal(done.batch.metric, [1, 0, 0, 0])
  np.testing.assert_array_equal(done.batch.weight, [1, 0, 1, 0])
  np.testing.assert_array_equal(done.batch.valid, True)
  assert done.metrics['overlong/penalty'] == -0.25
  assert done.metrics['overlong/masked'] == 0.5
  assert done.metrics['reward/total'] == 0.25  # raw
  # Truncated long before the limit on an episode: no less than at it.
  made, _ = collector(
      ['right cut', 'wrong long'], overlong__penalty=0.5, overlong__mask=True
  )
  done = made.collect(None, 0)
  np.testing.assert_allclose(done.batch.returns, [1, -0.5, 0, -0.5])
  np.testing.assert_array_equal(done.batch.weight, [1, 0, 1, 0])
  # Half of the penalty in the middle of the buffer.
  made, _ = collector([MIXED] * 2, overlong__penalty=1.0, overlong__limit=8)
  np.testing.assert_allclose(
      made.collect(None, 0).batch.returns, [0.5, -0.5] * 2
  )


def test_penalties_for_length_are_no_spread_of_raw_returns():
  """All wrong, and only one of each group is long."""
  made, _ = collector(['wrong long'] * 2, overlong__penalty=0.5)
  done = made.collect(None, 0)
  np.testing.assert_allclose(done.batch.returns, [0, -0.5] * 2)
  assert done.metrics['collect/return_std'] == 0


def test_replay_fills_its_share_and_spares_rollouts():
  made, engine = collector(
      [MIXED] * 7,
      replay__capacity=2,
      replay__share=0.5,
      replay__max_age=2,
  )
  first = made.collect(None, 0)
  assert first.metrics['replay/share'] == 0
  assert first.metrics['replay/size'] == 2
  second = made.collect(None, 1)
  assert len(engine.requests[1]) == SAMPLES
  assert second.metrics['replay/share'] == 0.5
  assert second.metrics['replay/age'] == 1
  # Fresh ones first; a replayed group keeps its names, version and log-probs.
  assert uids(second.scored)[:2] == [4, 5]
  assert uids(second.scored)[2:] in ([0, 1], [2, 3])
  np.testing.assert_array_equal(second.batch.policy_version[:, 0], [1, 1, 0, 0])
  np.testing.assert_array_equal(first.batch.fresh, True)
  np.testing.assert_array_equal(second.batch.fresh, [True, True, False, False])
  assert len(second.played.episodes) == 2
  # Only fresh groups are admitted: two of 0 and one of 1, the oldest leaves.
  assert [group.version for group in made.kept.replay] == [0, 1]
  assert _shapes(first) == _shapes(second)
  again, _ = collector([MIXED] * 7, replay__capacity=2, replay__max_age=2)
  again.collect(None, 0)
  assert uids(again.collect(None, 1).scored) == uids(second.scored)


REMAX = {'algorithm__advantage': 'remax'}


def test_remax_has_the_greedy_return_of_its_prompt_as_baseline():
  made, engine = collector(
      ['right wrong long', 'wrong wrong right'], overlong__penalty=0.5, **REMAX
  )
  done = made.collect(None, 0)
  np.testing.assert_allclose(done.batch.baseline, [-0.5, -0.5, 1, 1])
  np.testing.assert_array_equal(done.batch.weight, 1)
  asked = [r for r in engine.requests[0] if r.greedy]
  # In the environment of the first episode of its group.
  assert [(r.uid, r.group) for r in asked] == [(0, 0), (2, 1)]
  assert uids(done.scored) == uids(done.played) == [0, 1, 2, 3]
  assert done.metrics['episode/accuracy'] == 0.25
  assert done.metrics['episode/greedy_episodes'] == 2
  assert done.metrics['episode/greedy_accuracy'] == 0.5
  assert done.metrics['episode/greedy_failed'] == 0


def test_a_greedy_episode_that_fails_costs_its_group_the_loss():
  made, _ = collector(['right wrong dead', 'wrong wrong right'], **REMAX)
  done = made.collect(None, 0)
  np.testing.assert_array_equal(done.batch.weight, [0, 0, 1, 1])
  np.testing.assert_array_equal(done.batch.valid, [False, False, True, True])
  np.testing.assert_array_equal(done.batch.baseline, [0, 0, 1, 1])
  assert done.metrics['episode/greedy_failed'] == 1
  assert done.metrics['failures/episodes'] == 0


def test_a_group_without_its_baseline_is_made_up_for_and_never_replayed():
  scripts = ['right wrong dead', 'right wrong right', 'wrong right wrong']
  made, engine = collector(
      [*scripts, RIGHT], filter__name='dynamic_sampling', **REMAX
  )
  done = made.collect(None, 0)
  assert engine.waves == 2
  assert [e.task.uid for e in done.scored.episodes[::2]] == ['1', '2']
  np.testing.assert_array_equal(done.batch.baseline, [1, 1, 0, 0])

  made, _ = collector(scripts[:2], replay__capacity=4, **REMAX)
  done = made.collect(None, 0)
  np.testing.assert_array_equal(done.batch.weight, [0, 0, 1, 1])
  assert [g.episodes[0].task.uid for g in made.kept.replay] == ['1']


def test_an_interrupt_between_waves_leaves_no_trace():
  made, _ = collector(
      [MIXED, MIXED, RIGHT, MIXED],
      ScriptedEngine(stop_at_wave=2),
      filter__name='dynamic_sampling',
      replay__capacity=4,
      replay__share=0.5,
  )
  made.collect(None, 0)
  before = made.kept
  assert len(before.replay) == 2
  with pytest.raises(Interrupted):
    made.collect(None, 1)  # in its second wave
  assert made.kept is before
