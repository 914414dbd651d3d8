"""The watch in a whole run: warnings are told, the stop rule ends it."""

import json

import pytest

from agent_rl_jax.train import run, settings
from configs import base
from tests.entry import runner


@pytest.mark.slow
def test_a_run_ends_where_the_rule_says_and_stays_ended(
    tmp_path, monkeypatch, capsys
):
  runner.make_erratic(monkeypatch)
  config = runner.tiny(tmp_path)
  config.sft.exercise_steps = config.sft.steps = 0
  config.train.pack_len = (160,)
  config.eval.final_problems = 4
  config.report.html = False
  config.watch.stop = True
  # No accuracy is enough: the third validation, after step 6, would end the
  # run, if the spread, which has to grow, did not after step 5.
  config.watch.base_steps = 3
  config.watch.stop_fraction = 1000.0
  config.watch.stop_steps = 2
  config.watch.stop_success = 1.1
  config.watch.stop_validations = 3

  def go():
    return run.run(config, settings.resolve(config, base.get_config()))

  first = go()
  assert first is not None
  assert 'of its first 3 steps' in capsys.readouterr().err
  log = (tmp_path / 'rl' / 'metrics.jsonl').read_text()
  lines = [json.loads(line) for line in log.splitlines()]
  assert [line['step'] for line in lines if 'train/loss' in line] == [
      1, 2, 3, 4, 5
  ]  # fmt: skip
  assert all('watch/signs' in line for line in lines if 'train/loss' in line)
  # The last step is saved though no checkpoint was due.
  steps = {p.name for p in (tmp_path / 'rl' / 'checkpoints').iterdir()}
  assert '5' in steps
  # Without its result the run is found ended, not gone on with.
  (tmp_path / 'rl' / 'final.json').unlink()
  assert go()['accuracy'] == first['accuracy']
  assert (tmp_path / 'rl' / 'metrics.jsonl').read_text() == log
