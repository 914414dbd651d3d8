"""The stream of tasks: sources with random access, in a shuffled, saved order.

A source is a sequence of tasks (procedural, JSONL, TFDS); grain decides the
order, a global shuffle that differs from epoch to epoch; the stream's position
is one integer.  Leaves out how records are read (jsonl.py, tfds_source.py,
records.py).  Invariant: the task at a position is a pure function of (source,
seed, position), so a stream restored at its cursor goes on exactly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grain

from agent_rl_jax import types
from agent_rl_jax.data import jsonl, named, records, tfds_source, word_problems

_log = logging.getLogger(__name__)

_MAX_LENGTH = 2**31 - 1  # grain's shuffle works on 32-bit indices.


class TaskSource(Protocol):
  """A finite sequence of tasks with random access.

  `fingerprint` names the content: equal fingerprints mean equal tasks at equal
  indices.  An item that cannot be made into a task raises RecordError.
  """

  name: str
  fingerprint: str

  def __len__(self) -> int:
    ...

  def __getitem__(self, index: int) -> types.Task:
    ...


class TaskStream:
  """Endless tasks of a source, epoch after epoch, with a saved position.

  Attributes:
    cursor: Next position; malformed records count as positions too.
    skipped: Malformed records passed over so far.
  """

  def __init__(
      self,
      source: TaskSource,
      *,
      seed: int,
      shuffle: bool = True,
      start: int = 0,
      on_error: str = 'skip',
  ):
    """Starts at position `start`.

    Args:
      source: The tasks.
      seed: Names the order.
      shuffle: Shuffled anew in every epoch, or in the source's own order.
      start: First position.
      on_error: 'skip' passes over records that give no task, with a warning;
        'raise' raises their RecordError.

    Raises:
      ValueError: The source is empty or too long, or an option is invalid.
    """
    records.check_on_error(on_error)
    if not len(source):
      raise ValueError(f'task source {source.name!r} is empty')
    if len(source) > _MAX_LENGTH:
      raise ValueError(
          f'task source {source.name!r} has {len(source)} tasks, more than'
          f' {_MAX_LENGTH}; give a smaller size or a slice'
      )
    if start < 0:
      raise ValueError(f'start={start} must not be negative')
    self.source = source
    self.seed = int(seed)
    self.shuffle = bool(shuffle)
    self.cursor = int(start)
    self.skipped = 0
    self._on_error = on_error
    order = grain.MapDataset.range(len(source))
    if shuffle:
      # grain's seed of epoch e is seed + e: hashed first, or the second epoch
      # of seed 0 would be the first of seed 1.
      hashed = named.named_generator('task_order', self.seed).integers(2**32)
      order = order.shuffle(seed=int(hashed))
    self._order = order.repeat()

  @property
  def epoch(self) -> int:
    """Epoch that the cursor is in, from 0."""
    return self.cursor // len(self.source)

  def index(self, position: int) -> int:
    """Index in the source of a position of the stream."""
    return int(self._order[position])

  def at(self, position: int) -> types.Task:
    """Task at a position; raises RecordError where its record gives none."""
    return self.source[self.index(position)]

  def take(self, count: int) -> list[types.Task]:
    """The next `count` tasks, advancing the cursor.

    Raises:
      records.RecordError: A malformed record with on_error='raise', or a whole
        epoch of them with 'skip'.
    """
    tasks: list[types.Task] = []
    bad = 0
    while len(tasks) < count:
      try:
        tasks.append(self.at(self.cursor))
        bad = 0
      except records.RecordError as error:
        bad += 1
        if self._on_error == 'raise':
          raise
        if bad >= len(self.source):
          raise records.RecordError(
              f'no record of {self.source.name!r} gives a task; the last: '
              f'{error}'
          ) from None
        self.skipped += 1
        _log.warning('malformed record skipped: %s', error)
      self.cursor += 1
    return tasks

  def state(self) -> dict[str, Any]:
    """Position and what it is a position in, as JSON-like values."""
    return {
        'cursor': self.cursor,
        'skipped': self.skipped,
        **self._identity(),
    }

  def _identity(self) -> dict[str, Any]:
    return {
        'source': self.source.fingerprint,
        'length': len(self.source),
        'seed': self.seed,
        'shuffle': self.shuffle,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes to a saved position.

    Raises:
      ValueError: The state belongs to another source, seed or order.
    """
    differing = [
        f'{key}: saved {state.get(key)!r}, now {value!r}'
        for key, value in self._identity().items()
        if state.get(key) != value
    ]
    if differing:
      raise ValueError(
          'the saved task cursor belongs to other data ('
          + '; '.join(differing)
          + '): restore the data options, or start a new run folder'
      )
    self.cursor = int(state['cursor'])
    self.skipped = int(state['skipped'])


SOURCES: dict[str, Callable[..., TaskSource]] = {
    'word_problems': word_problems.WordProblemSource,
    'jsonl': jsonl.JsonlSource,
    'tfds': tfds_source.TfdsSource,
}


def make_source(kind: str, **options) -> TaskSource:
  """Source of a kind from its own options.

  Raises:
    ValueError: An unknown kind, or what the source refuses.
  """
  if kind not in SOURCES:
    raise ValueError(f'kind={kind!r} is not one of {sorted(SOURCES)}')
  return SOURCES[kind](**options)


# The options that each kind of source reads, beyond those that all do.
_RECORD_FIELDS = (
    'name',
    'parser',
    'question_field',
    'answer_field',
    'extra_fields',
    'instruction',
)
_READS = {
    'word_problems': ('split', 'size'),
    'jsonl': ('path', *_RECORD_FIELDS),
    'tfds': ('path', 'dataset', 'data_dir', 'split', *_RECORD_FIELDS),
}
_ALL_READ = ('kind', 'env', 'system', 'shuffle', 'on_error')


@dataclasses.dataclass(frozen=True)
class DataOptions:
  """Where tasks come from; a key that the kind does not read must stay unset.

  Attributes:
    kind: Key of SOURCES.
    env: Key of the environment that plays the tasks.
    system: System message in front of every task; empty for none.
    shuffle: Shuffled anew in every epoch, or in the source's own order.
    on_error: 'skip' or 'raise' for malformed records.
    split: word_problems: 'train' or 'heldout'; tfds: split or slice.
    size: word_problems: number of tasks in an epoch.
    path: jsonl: the file; tfds: folder of a prepared data set.
    dataset: tfds: registered name, instead of path.
    data_dir: tfds: root of the prepared data sets for `dataset`.
    name: Name of the data set; taken from the file or data set when empty.
    parser: Key of records.PARSERS.
    question_field: Field with the problem's text.
    answer_field: Field with the gold answer.
    extra_fields: More fields to copy into the payload, as text.
    instruction: Text appended to every question after a blank line.
  """

  kind: str = 'word_problems'
  env: str = 'tool'
  system: str = ''
  shuffle: bool = True
  on_error: str = 'skip'
  split: str = 'train'
  size: int = 100_000
  path: str = ''
  dataset: str = ''
  data_dir: str = ''
  name: str = ''
  parser: str = 'gsm8k'
  question_field: str = 'question'
  answer_field: str = 'answer'
  extra_fields: tuple[str, ...] = ()
  instruction: str = ''

  def __post_init__(self):
    object.__setattr__(self, 'extra_fields', tuple(self.extra_fields))
    if self.kind not in SOURCES:
      raise ValueError(f'kind={self.kind!r} is not one of {sorted(SOURCES)}')
    records.check_on_error(self.on_error)
    read = _READS[self.kind] + _ALL_READ
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name not in read and value != field.default:
        raise ValueError(
            f'{field.name}={value!r} is set, but kind={self.kind!r} reads only'
            f' {sorted(read)}; unset it or change the kind'
        )
    if self.kind == 'jsonl' and not self.path:
      raise ValueError("kind='jsonl' needs path, the JSONL file")
    if self.kind == 'tfds' and bool(self.path) == bool(self.dataset):
      raise ValueError(
          f"kind='tfds' needs one of path={self.path!r} (a prepared folder) and"
          f' dataset={self.dataset!r} (a TFDS name)'
      )
    if self.data_dir and not self.dataset:
      raise ValueError(
          f'data_dir={self.data_dir!r} needs dataset, the TFDS name inside it'
      )
    if self.kind == 'word_problems':
      word_problems.WordProblemSource(**self.source_options(seed=0))
    else:
      self.record_options()

  def record_options(self) -> records.RecordOptions:
    """How records become tasks (jsonl and tfds)."""
    return records.RecordOptions(
        parser=self.parser,
        question_field=self.question_field,
        answer_field=self.answer_field,
        extra_fields=self.extra_fields,
        system=self.system,
        instruction=self.instruction,
        env=self.env,
    )

  def source_options(self, seed: int) -> dict[str, Any]:
    """Keyword arguments of this kind's source; `seed` names procedural data."""
    if self.kind == 'word_problems':
      return {
          'seed': seed,
          'split': self.split,
          'size': self.size,
          'env': self.env,
          'system': self.system,
      }
    options = {
        'options': self.record_options(),
        'path': self.path,
        'name': self.name,
    }
    if self.kind == 'jsonl':
      return {**options, 'on_error': self.on_error}
    return {
        **options,
        'dataset': self.dataset,
        'data_dir': self.data_dir,
        'split': self.split,
    }


def make_stream(
    options: DataOptions, *, seed: int, start: int = 0
) -> TaskStream:
  """Stream of the configured source; `seed` names its order and content."""
  source = make_source(options.kind, **options.source_options(seed))
  return TaskStream(
      source,
      seed=seed,
      shuffle=options.shuffle,
      start=start,
      on_error=options.on_error,
  )
