"""Curves and the progress bar."""

import io

from agent_rl_jax.train.report import curves, progress, writers


def _log(path, scale, steps=20):
  writer = writers.JsonlWriter(path)
  for step in range(steps):
    values = {
        'reward/total': scale * step / 20,
        'episode/accuracy': scale * step / 25,
        'episode/action_tokens': 40 - step,
    }
    if step % 5 == 0:
      values['eval/accuracy'] = scale * step / 22
    writer.write(step, values)
  writer.write(steps, {'reward/total': float('nan')})
  writer.close()
  return path


def test_series_are_read_with_their_own_steps(tmp_path):
  log = _log(tmp_path / 'a.jsonl', 1.0)
  series = curves.read_series(log, ['eval/accuracy', 'nothing/here'])
  assert series == {
      'eval/accuracy': ([0, 5, 10, 15], [0.0, 5 / 22, 10 / 22, 15 / 22])
  }


def test_draws_a_png(tmp_path):
  logs = {
      'with tool': _log(tmp_path / 'a.jsonl', 1.0),
      'text only': _log(tmp_path / 'b.jsonl', 0.1),
  }
  path = tmp_path / 'out' / 'curves.png'
  curves.draw_curves(logs, path, title='Run')
  assert path.read_bytes().startswith(b'\x89PNG')
  assert path.stat().st_size > 20_000
  assert [p.name for p in path.parent.iterdir()] == ['curves.png']


def test_draws_before_anything_is_logged(tmp_path):
  path = tmp_path / 'curves.png'
  curves.draw_curves({'run': tmp_path / 'none.jsonl'}, path)
  assert path.read_bytes().startswith(b'\x89PNG')


class _Terminal(io.StringIO):

  def isatty(self):
    return True


METRICS = {
    'reward/total': 0.5,
    'episode/accuracy': 0.25,
    'time/tokens_per_second': 1234.5,
}


def test_lines_without_a_terminal():
  stream = io.StringIO()
  bar = progress.Progress('rl', 7, log_every=3, stream=stream)
  for step in range(1, 8):
    bar.update(step, METRICS)
  bar.say('saved')
  bar.close()
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines[:-1]] == ['3/7', '6/7', '7/7']
  assert 'reward 0.50 accuracy 0.25 tok/s 1234' in lines[0]
  assert lines[2].endswith('< 0:00]') and lines[3] == 'saved'


def test_time_left_does_not_count_steps_before_a_resume(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  stream = io.StringIO()
  bar = progress.Progress('rl', 50, start=40, stream=stream)
  now[0] += 10
  bar.update(45, METRICS)
  assert '[0:10 < 0:10]' in stream.getvalue()


def test_bar_on_a_terminal():
  stream = _Terminal()
  bar = progress.Progress('rl', 4, start=1, stream=stream)
  for step in range(2, 5):
    bar.update(step, METRICS)
  bar.close()
  text = stream.getvalue()
  assert '4/4' in text and 'reward=0.50' in text and 'tok/s=1234' in text


def test_disabled_shows_nothing():
  stream = io.StringIO()
  bar = progress.Progress('rl', 1, enabled=False, stream=stream)
  bar.update(1, METRICS)
  bar.close()
  assert stream.getvalue() == ''


def test_clock():
  assert progress.clock(59.6) == '1:00'
  assert progress.clock(3723) == '1:02:03'
