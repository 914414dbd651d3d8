"""Studies: what is planned, run, skipped and left out; statistics by hand."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from agent_rl_jax.algorithms.advantages import ADVANTAGES
from agent_rl_jax.algorithms.losses import LOSSES
from agent_rl_jax.train import processes, settings, sweep
from agent_rl_jax.train.report import study, writers
from configs import base
from configs.studies import algorithms

TWO_CORES = pytest.mark.skipif(
    len(processes.shares(1)[0]) < 2, reason='needs two cores'
)

# Stands in for a run: writes what a finished one leaves, or fails or hangs.
_WORKER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / 'config.json').read_text())
arm, seed = folder.parent.name, config['seed']
with open(folder.parents[1] / 'order.txt', 'a') as file:
  file.write(f'{arm} {seed}\\n')
if arm == 'cold_start':
  (folder / 'cold_start' / 'checkpoints').mkdir(parents=True)
  (folder / 'cold_start' / 'checkpoints' / 'weights').write_text(str(seed))
  (folder / 'tokenizer.model').write_text('pieces')
  (folder / 'cold_start_evaluation').mkdir()
  (folder / 'cold_start_evaluation' / 'final.json').write_text('{}')
  sys.exit(0)
start = folder / 'cold_start' / 'checkpoints' / 'weights'
assert start.read_text() == str(seed)
assert (folder / 'tokenizer.model').read_text() == 'pieces'
if (folder.parents[1] / 'meet').exists():
  # Goes on only when as many runs as it says are here at once.
  here = folder.parents[1] / f'here {arm} {seed}'
  cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else ()
  here.write_text(json.dumps(sorted(cores)))
  until = time.monotonic() + 60
  while len(list(folder.parents[1].glob('here *'))) < 2:
    if time.monotonic() > until:
      sys.exit('nobody came')
    time.sleep(0.02)
if (folder.parents[1] / f'{arm}.fails').exists():
  sys.exit('no')
if (folder.parents[1] / f'{arm}.hangs').exists():
  (folder.parents[1] / 'hanging').write_text('')
  try:
    time.sleep(60)
  except KeyboardInterrupt:
    sys.exit(0)
(folder / 'summary.json').write_text(json.dumps({
    'accuracy': {'cold start': 0.25, 'after RL': 0.5 + seed / 10},
    'seconds': {'after RL': {'rollout': 2.0, 'update': 3.0, 'tools': 9.0}},
}))
"""


def _config(tmp_path, **study_keys):
  config = algorithms.get_config()
  config.run_dir = str(tmp_path / 'study')
  config.study.seeds = (0, 1)
  config.study.only = ('grpo_gspo',)
  for key, value in study_keys.items():
    config.study[key] = value
  return config


def _plan(tmp_path, **study_keys):
  return sweep.plan(_config(tmp_path, **study_keys), base.get_config())[1]


@pytest.fixture
def go(tmp_path):
  worker = tmp_path / 'worker.py'
  worker.write_text(_WORKER)
  (tmp_path / 'study').mkdir()

  def run(jobs=1, **study_keys):
    said = []
    results = sweep.run_study(
        _plan(tmp_path, **study_keys),
        lambda folder: [sys.executable, str(worker), str(folder)],
        said.append,
        jobs,
    )
    return results, said

  return run


def _order(tmp_path):
  return (tmp_path / 'study' / 'order.txt').read_text().splitlines()


def test_every_algorithm_has_an_arm_that_can_be_run():
  config = algorithms.get_config()
  options, configs = sweep.plan(config, base.get_config())
  assert len(configs) == (len(options.arms) + 1) * 3
  made = [
      settings.resolve(c, base.get_config()).algorithm
      for (name, seed), c in configs.items()
      if seed == 0 and name != sweep.COLD_START
  ]
  assert {m.advantage for m in made} == set(ADVANTAGES)
  assert {m.loss for m in made} == set(LOSSES) - {'sft'}


def test_arms_differ_in_what_they_name_only(tmp_path):
  config = algorithms.get_config()
  options, configs = sweep.plan(config, base.get_config())
  common = sweep.config_lib.flatten(configs['grpo', 0])
  for name, changes in options.chosen().items():
    for seed in options.seeds:
      own = sweep.config_lib.flatten(configs[name, seed])
      differing = {k for k in own if own[k] != common[k]}
      assert differing <= {*changes, 'seed', 'run_dir'}, name
      assert common['train.mini_batches'] == own['train.mini_batches'] == 4


def test_seeds_share_a_cold_start_and_finished_runs_are_skipped(go, tmp_path):
  results, said = go()
  assert _order(tmp_path) == [
      'cold_start 0', 'grpo 0', 'grpo_gspo 0',
      'cold_start 1', 'grpo 1', 'grpo_gspo 1',
  ]  # fmt: skip
  assert [(r.arm, r.seed, r.start, r.accuracy, r.seconds) for r in results] == [
      ('grpo', 0, 0.25, 0.5, 5.0),
      ('grpo', 1, 0.25, 0.6, 5.0),
      ('grpo_gspo', 0, 0.25, 0.5, 5.0),
      ('grpo_gspo', 1, 0.25, 0.6, 5.0),
  ]
  assert said[1].startswith('[2/6] grpo, seed 0: 0.250 -> 0.500')
  again, said = go()
  assert again == results and len(_order(tmp_path)) == 6
  assert all('finished before' in line for line in said)
  # Another arm and seed go on from what is there.
  more, _ = go(only=('grpo_gspo', 'rloo'), seeds=(0, 1, 2))
  assert _order(tmp_path)[6:] == [
      'rloo 0', 'rloo 1', 'cold_start 2', 'grpo 2', 'rloo 2', 'grpo_gspo 2',
  ]  # fmt: skip
  assert len(more) == 9


def test_a_run_that_fails_costs_its_own_row(go, tmp_path):
  mark = tmp_path / 'study' / 'grpo.fails'
  mark.write_text('')
  results, said = go()
  assert [r.arm for r in results] == ['grpo_gspo', 'grpo_gspo']
  assert 'failed after' in said[1] and 'output.txt' in said[1]
  output = tmp_path / 'study' / 'grpo' / 'seed_0' / 'output.txt'
  assert output.read_text() == 'no\n'
  mark.unlink()
  results, _ = go()
  assert len(results) == 4 and _order(tmp_path)[6:] == ['grpo 0', 'grpo 1']


def test_half_a_copied_start_is_copied_again(go, tmp_path):
  partial = tmp_path / 'study' / 'grpo' / 'seed_0' / 'cold_start.partial'
  partial.mkdir(parents=True)
  (partial / 'rest').write_text('')
  results, _ = go()
  assert len(results) == 4 and not partial.exists()
  assert not (partial.parent / 'cold_start' / 'rest').exists()


def test_ctrl_c_ends_the_run_and_then_the_study(go, tmp_path):
  (tmp_path / 'study' / 'grpo.hangs').write_text('')
  hanging = tmp_path / 'study' / 'hanging'

  def interrupt():
    while not hanging.exists():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  results, said = go()
  thread.join()
  assert results is None
  assert 'run the same command again' in said[-1]
  assert _order(tmp_path) == ['cold_start 0', 'grpo 0']
  (tmp_path / 'study' / 'grpo.hangs').unlink()
  assert len(go()[0]) == 4


@TWO_CORES
def test_two_runs_at_a_time_have_their_own_cores(go, tmp_path):
  root = tmp_path / 'study'
  (root / 'meet').write_text('')
  results, said = go(jobs=2, seeds=(0,))
  assert [r.arm for r in results] == ['grpo', 'grpo_gspo']
  assert len(said) == 3
  first, second = (
      json.loads((root / f'here {arm} 0').read_text())
      for arm in ('grpo', 'grpo_gspo')
  )
  if first or second:
    assert first and second and not set(first) & set(second)
  # Both wait for the cold start that they share.
  assert _order(tmp_path)[0] == 'cold_start 0'


@TWO_CORES
def test_ctrl_c_reaches_every_run(go, tmp_path):
  root = tmp_path / 'study'
  for name in ('meet', 'grpo.hangs', 'grpo_gspo.hangs'):
    (root / name).write_text('')

  def interrupt():
    while len(list(root.glob('here *'))) < 2 or not (root / 'hanging').exists():
      time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  results, said = go(jobs=2, seeds=(0,))
  thread.join()
  assert results is None and 'Interrupted' in said[-1]
  for name in ('grpo.hangs', 'grpo_gspo.hangs'):
    (root / name).unlink()
  assert len(go(jobs=2, seeds=(0,))[0]) == 2


def test_more_jobs_than_cores_are_refused(go):
  with pytest.raises(ValueError, match='jobs=10000: give 1 to'):
    go(jobs=10_000)


def test_an_error_ends_what_runs(tmp_path):
  code = 'import time\ntry:\n  time.sleep(60)\nfinally:\n  print("ended")'
  with pytest.raises(OSError, match='no room'):
    with processes.Pool(1) as pool:
      pool.start('a', [sys.executable, '-c', 'print("x")'], tmp_path / 'a')
      assert pool.wait()[0] == 'a' and pool.free
      pool.start('b', [sys.executable, '-c', code], tmp_path / 'b')
      process = pool._running['b'].process
      raise OSError('no room')
  assert process.poll() is not None
  assert (tmp_path / 'a').read_text() == 'x\n'
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_folder_of_another_study_is_refused(go, tmp_path):
  go()
  config = _config(tmp_path)
  config.train.lr = 1e-4
  with pytest.raises(sweep.StudyError, match='train.lr: 0.0003 -> 0.0001'):
    sweep.run_study(sweep.plan(config, base.get_config())[1], None)


@pytest.mark.parametrize(
    'keys, message',
    [
        ({'seeds': ()}, r'study.seeds=\(\): give one or more'),
        ({'seeds': (1, 1)}, 'different seeds'),
        ({'only': ('grpo_gsp',)}, "'grpo_gsp' is no arm; did you mean 'grpo_g"),
        ({'baseline': 'x'}, "'x' is no arm"),
        ({'jobs': 0}, 'study.jobs=0 must be at least 1'),
        ({'arms': (('cold_start', ()),)}, 'none can be'),
        ({'arms': (('grpo', (('train.lrr', 1.0),)),), 'only': ()},
         "arm 'grpo': unknown config key 'train.lrr'; did you mean 'train.lr'"),
        ({'arms': (('grpo', (('train.samples', 1),)),), 'only': ()},
         "arm 'grpo': .*a group of one"),
    ],
)  # fmt: skip
def test_impossible_studies_name_the_key(tmp_path, keys, message):
  with pytest.raises(ValueError, match=message):
    _plan(tmp_path, **keys)


def test_a_study_without_a_cold_start_is_refused(tmp_path):
  config = _config(tmp_path)
  config.sft.steps = config.sft.exercise_steps = 0
  with pytest.raises(sweep.StudyError, match='compares with its cold start'):
    sweep.plan(config, base.get_config())


@pytest.mark.parametrize(
    't, degrees, p',
    [
        # Two-sided critical values of Student's t, as printed in tables.
        (12.7062, 1, 0.05),
        (4.30265, 2, 0.05),
        (3.18245, 3, 0.05),
        (2.77645, 4, 0.05),
        (-2.57058, 5, 0.05),
        (9.92484, 2, 0.01),
        (1.81246, 10, 0.10),
        (2.09302, 19, 0.05),
        (0.0, 2, 1.0),
    ],
)
def test_p_values_are_those_of_the_tables(t, degrees, p):
  assert study.t_p_value(t, degrees) == pytest.approx(p, rel=1e-4)


def test_paired_test_by_hand():
  # Mean 0.2, deviation 0.1, t = 0.2 / (0.1 / sqrt 3) = 3.4641, and with two
  # degrees of freedom p = 1 - t / sqrt(2 + t^2) = 1 - 3.4641 / 3.7417.
  got = study.paired([0.1, 0.2, 0.3])
  assert got.mean == pytest.approx(0.2)
  assert got.deviation == pytest.approx(0.1)
  assert got.p == pytest.approx(1 - 3.4641016 / 3.7416574, rel=1e-6)
  assert not got.significant
  assert study.paired([0.5]) == study.Paired(0.5, None, None)
  assert study.paired([0.5, 0.5]) == study.Paired(0.5, 0.0, None)
  # Equal but for rounding: 0.7 - 0.1 is not 0.9 - 0.3.
  gains = [0.7 - 0.1, 0.9 - 0.3, 0.8 - 0.2]
  assert len(set(gains)) > 1
  got = study.paired(gains)
  assert (got.deviation, got.p, got.significant) == (0.0, None, False)


def _results(tmp_path):
  made = []
  for arm, seed, start, end in (
      ('a', 0, 0.2, 0.90), ('a', 1, 0.3, 0.91), ('a', 2, 0.1, 0.92),
      ('b', 0, 0.2, 0.20), ('b', 1, 0.3, 0.50), ('b', 2, 0.1, 0.05),
      ('c', 0, 0.2, 0.80),
  ):  # fmt: skip
    log = tmp_path / f'{arm}{seed}.jsonl'
    writer = writers.JsonlWriter(log)
    for step in range(4 + seed):
      lead = 0.01 * (seed + 1) if arm == 'b' else 0.0
      writer.write(step, {'episode/accuracy': step / 5 + seed / 10 + lead})
    writer.close()
    training = study.mean_of(log, 'episode/accuracy') if arm != 'c' else None
    seconds = 10.0 * (seed + 1)
    made.append(sweep.Result(arm, seed, start, end, training, seconds, log))
  return made


def test_the_table_marks_what_is_not_significant(tmp_path):
  changes = {'a': {}, 'b': {'k': 'v'}, 'c': {}, 'never ran': {}}
  rows = study.summarize(_results(tmp_path), 'a', changes)
  assert [row['arm'] for row in rows] == ['a', 'b', 'c']
  json.dumps(rows)
  assert rows[1]['gain']['mean'] == pytest.approx(0.05)
  assert rows[1]['against_baseline']['mean'] == pytest.approx(-0.66)
  assert rows[2]['gain']['p'] is None
  lacking = study.missing(_results(tmp_path), list(changes), (0, 1, 2))
  assert lacking == {'c': [1, 2], 'never ran': [0, 1, 2]}
  lines = study.markdown(rows, 'a', 256, lacking).splitlines()
  assert lines[4].startswith(
      '| a | 3 | 0.910 ± 0.010 | +0.710 ± 0.105 | 0.007 |  |  |'
      ' 0.500 ± 0.200 |  |  | 20 |'
  )
  assert '`k=v`' in lines[5] and '-0.660' in lines[5]
  # Leads of .01, .02 and .03: t = .02 / (.01 / sqrt 3) = 3.46.
  assert '0.520 ± 0.210 | +0.020 ± 0.010 | 0.074 |' in lines[5]
  assert '| 0.800 | +0.600 | – | -0.100 | – |  |  |  | 10 |' in lines[6]
  text = '\n'.join(lines)
  assert '(p >= 0.05, no p or no gain): b, c.' in text
  assert 'c (seed 1, 2), never ran (seed 0, 1, 2).' in lines[-1]
  assert 'Missing' not in study.markdown(rows, 'a', 256, {})
  assert 'After RL significantly better than a: none;' in text
  assert 'significantly worse: b.' in text
  assert 'Over training significantly better than a: none;' in text


def test_curves_are_means_and_extremes_over_seeds(tmp_path):
  results = _results(tmp_path)
  logs = {a: [r.log for r in results if r.arm == a] for a in 'abc'}
  steps, mean, low, high = study._band(logs['a'], 'episode/accuracy')
  assert steps == [0, 1, 2, 3, 4, 5]
  assert mean[0] == pytest.approx(0.1)
  assert (low[0], high[0]) == (0.0, 0.2)
  assert mean[5] == pytest.approx(1.2)  # of the longest alone
  study.draw(logs, tmp_path / 'out' / 'curves.png', 'a')
  path = tmp_path / 'out' / 'curves.png'
  assert path.read_bytes().startswith(b'\x89PNG')
  assert path.stat().st_size > 5_000
