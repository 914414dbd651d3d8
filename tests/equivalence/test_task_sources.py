"""The same tasks out of a JSONL file and of a TFDS data set built from it."""

import json
import subprocess
import sys

import pytest

from agent_rl_jax.data import records, tasks, tfds_export, tfds_source

SIZE = 37


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  """A JSONL file with a malformed line in it, and its TFDS data set."""
  folder = tmp_path_factory.mktemp('sources')
  lines = [
      json.dumps(
          {
              'question': f'Ünïcode “{i}”,\n  line two?',
              'answer': f'#### {i},000',
          }
      )
      for i in range(SIZE)
  ]
  lines.insert(11, '{"question": "no answer"}')
  source = folder / 'Sums-and-more.jsonl'
  source.write_text('\n'.join(lines), encoding='utf-8')
  out = folder / 'prepared'
  # Several shards, the last one short.
  count = tfds_export.export_tfds(str(source), str(out), shard_records=10)
  assert count == SIZE
  return {'jsonl': str(source), 'tfds': str(out)}


def _stream(kind, paths, seed=3, **options):
  options = tasks.DataOptions(kind=kind, path=paths[kind], **options)
  return tasks.make_stream(options, seed=seed)


@pytest.mark.parametrize('shuffle', [True, False])
def test_same_tasks_in_the_same_order_before_and_after_a_resume(paths, shuffle):
  whole = _stream('jsonl', paths, shuffle=shuffle).take(3 * SIZE)
  assert whole[0].messages[0]['content'].startswith('Ünïcode “')
  for kind in ('jsonl', 'tfds'):
    first = _stream(kind, paths, shuffle=shuffle)
    head = first.take(SIZE + 5)
    assert head == whole[: SIZE + 5]
    state = json.loads(json.dumps(first.state()))
    second = _stream(kind, paths, shuffle=shuffle)
    second.restore(state)
    assert second.take(2 * SIZE - 5) == whole[SIZE + 5 :]


def test_slices_and_random_access(paths):
  stream = _stream('tfds', paths, split='train[5:9]', shuffle=False)
  source = _stream('jsonl', paths).source
  for position in (2, 0, 3, 1):
    task = stream.at(position)
    assert task.messages == source[5 + position].messages
    assert task.payload == source[5 + position].payload
  with pytest.raises(ValueError, match='length: saved 4, now 37'):
    _stream('tfds', paths, shuffle=False).restore(stream.state())


def test_a_data_set_by_name(paths, tmp_path):
  folder = tmp_path / 'sums_and_more'
  folder.mkdir()
  tfds_export.export_tfds(paths['jsonl'], str(folder / '1.0.0'))
  options = tasks.DataOptions(
      kind='tfds', dataset='sums_and_more', data_dir=str(tmp_path)
  )
  stream = tasks.make_stream(options, seed=3)
  assert stream.take(9) == _stream('jsonl', paths).take(9)


def test_tensorflow_is_not_imported(paths):
  code = (
      'import sys\n'
      'from agent_rl_jax.data import tasks, tfds_export\n'
      'options = tasks.DataOptions(kind="tfds", path=sys.argv[2])\n'
      'print(len(tasks.make_stream(options, seed=0).take(5)))\n'
      'print(tfds_export.export_tfds(sys.argv[1], sys.argv[2] + "_again"))\n'
      'print("tensorflow" in sys.modules)\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code, paths['jsonl'], paths['tfds']],
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.stdout.split() == ['5', str(SIZE), 'False'], done.stderr


def test_a_record_the_parser_refuses_is_named_by_its_number(paths, tmp_path):
  source = tmp_path / 'plain.jsonl'
  source.write_text(
      '{"question": "a", "answer": 1}\n{"question": "b", "answer": "#### 2"}\n'
  )
  out = str(tmp_path / 'plain')
  tfds_export.export_tfds(
      str(source), out, records.RecordOptions(parser='plain')
  )
  read = tfds_source.TfdsSource(path=out)  # As GSM8K, which record 0 is not.
  assert read[1].payload == {'answer': '2'}
  with pytest.raises(records.RecordError, match="split 'train' record 0: the"):
    read[0]
  stream = tasks.TaskStream(read, seed=0)
  assert [task.uid for task in stream.take(2)] == ['plain/1', 'plain/1']
  assert stream.skipped in (1, 2)


def test_what_cannot_be_read_says_what_to_do(paths, tmp_path):
  with pytest.raises(ValueError, match='cannot read split=.train. of TFDS'):
    tfds_source.TfdsSource(path=str(tmp_path))
  with pytest.raises(ValueError, match="split='dev'.*Unknown split"):
    tfds_source.TfdsSource(path=paths['tfds'], split='dev')
  options = records.RecordOptions(question_field='prompt')
  with pytest.raises(ValueError, match=r"no fields \['prompt'\] among"):
    tfds_source.TfdsSource(options, path=paths['tfds'])
  with pytest.raises(FileExistsError, match='remove it'):
    tfds_export.export_tfds(paths['jsonl'], paths['tfds'])
