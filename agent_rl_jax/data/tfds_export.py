"""Writes a JSONL file as a tensorflow-datasets data set, without TensorFlow.

`GeneratorBasedBuilder` prepares through TensorFlow or in hashed order; TFDS's
`SequentialWriter` with file_format='array_record' needs neither: it keeps the
order of the file.  Fields are stored as text, numbers as Python writes them.
Leaves out downloading.  Invariant: the data set holds exactly the good records
of the file, in order, so both give the same tasks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from agent_rl_jax.data import jsonl, records, tfds_source

_BATCH = 1024


def export_tfds(
    source_path: str,
    out_dir: str,
    options: records.RecordOptions | None = None,
    *,
    split: str = 'train',
    name: str = '',
    version: str = '1.0.0',
    on_error: str = 'skip',
    shard_records: int = 100_000,
) -> int:
  """Makes the TFDS data set `out_dir` from a JSONL file; returns its length.

  Only the fields that `options` reads are stored.  The folder appears whole or
  not at all.

  Args:
    source_path: The JSONL file.
    out_dir: Folder to make; `tfds.builder_from_directory(out_dir)` reads it.
    options: Names the fields, and judges which records are good.
    split: Name of the one split.
    name: Name of the data set; the file's name by default.
    version: Its version.
    on_error: 'skip' leaves malformed records out, 'raise' fails on the first.
    shard_records: Most records in one ArrayRecord file.

  Raises:
    FileExistsError: `out_dir` is there already.
    ValueError, records.RecordError: As JsonlSource.
  """
  if shard_records < 1:
    raise ValueError(f'shard_records={shard_records} must be at least 1')
  out_dir = os.path.abspath(os.path.expanduser(out_dir))
  if os.path.exists(out_dir):
    raise FileExistsError(
        f'out_dir={out_dir!r} exists; remove it or give another folder'
    )
  tfds = tfds_source.import_tfds()
  from tensorflow_datasets.core import sequential_writer

  source = jsonl.JsonlSource(source_path, options, on_error=on_error, name=name)
  partial = f'{out_dir}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  os.makedirs(partial)
  info = tfds.core.DatasetInfo(
      builder=tfds.core.DatasetIdentity(
          name=source.name,
          version=tfds.core.Version(version),
          data_dir=partial,
          module_name=__name__,
      ),
      features=tfds.features.FeaturesDict(
          {field: tfds.features.Text() for field in source.options.fields}
      ),
      disable_shuffling=True,
  )
  writer = sequential_writer.SequentialWriter(
      info, max_examples_per_shard=shard_records, file_format='array_record'
  )
  writer.initialize_splits([split])
  for batch in _batches(source):
    writer.add_examples({split: batch})
  writer.close_all()
  os.replace(partial, out_dir)
  return len(source)


def _batches(source: jsonl.JsonlSource) -> Iterator[list[dict[str, str]]]:
  fields = source.options.fields
  for start in range(0, len(source), _BATCH):
    stored = map(source.record, range(start, min(start + _BATCH, len(source))))
    yield [
        {field: records.field_text(record, field) for field in fields}
        for record in stored
    ]
