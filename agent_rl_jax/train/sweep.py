"""Studies: one config under several changes and seeds, run by run.

A study is a run's config with a section `study`: named lists of changed keys
(arms) and seeds.  Each arm and seed is a normal run in a folder of its own; all
arms of a seed begin from one cold start, trained once and copied.  Leaves out
what a run does (`run.py`) and how results are shown (`report/study.py`).
Invariant: the study's folder tells everything; running the same command again
skips what is finished and goes on with the rest.

Each run is a process of its own: its sandbox must fork before any device
thread exists, its memory and compiled programs end with it, and one that dies
costs its own row of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import processes, whole_file
from agent_rl_jax.train import settings as settings_lib
from agent_rl_jax.train.report import study
from agent_rl_jax.train.stage import write_json

# What a finished run's figures do not depend on.
_FREE = ('run_dir', 'report', 'checkpoint')

COLD_START = 'cold_start'


@dataclasses.dataclass(frozen=True)
class StudyOptions:
  """What is compared.

  Attributes:
    seeds: Each arm is run once under each.
    arms: (name, ((key, value), ...)) of every arm: what it changes.
    baseline: The arm that the others are compared with.
    only: Names of the arms to run; () for all.  The baseline is always run.
    jobs: Runs at a time, each on its share of the cores.  They would share an
      accelerator too, which most do not allow: then 1.
  """

  seeds: tuple[int, ...]
  arms: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
  baseline: str
  only: tuple[str, ...] = ()
  jobs: int = 1

  def __post_init__(self):
    names = [name for name, _ in self.arms]
    if self.jobs < 1:
      raise ValueError(f'study.jobs={self.jobs} must be at least 1')
    if not self.seeds or len(set(self.seeds)) < len(self.seeds):
      raise ValueError(
          f'study.seeds={self.seeds}: give one or more different seeds'
      )
    if len(set(names)) < len(names) or COLD_START in names:
      raise ValueError(
          f'study.arms has the names {names}: they must differ, and none can be'
          f' {COLD_START!r}'
      )
    for name in (self.baseline, *self.only):
      if name not in names:
        hint = config_lib.nearest(name, names)
        raise ValueError(
            f'study: {name!r} is no arm'
            + (f'; did you mean {hint!r}?' if hint else f': one of {names}')
        )

  def chosen(self) -> dict[str, dict[str, Any]]:
    """{name: changes} of the arms to run, the baseline first."""
    arms = {name: dict(changes) for name, changes in self.arms}
    wanted = [n for n in arms if n in self.only] if self.only else list(arms)
    order = [self.baseline, *(n for n in wanted if n != self.baseline)]
    return {name: arms[name] for name in order}


@dataclasses.dataclass(frozen=True)
class Result:
  """Where one run ended.

  Attributes:
    arm, seed: Which run.
    start: Accuracy of the cold start on the final held-out problems.
    accuracy: The same after RL.
    training: Mean over iterations of the accuracy of what was sampled: how
      fast it learned; None without a log.
    seconds: Of rollouts and updates.
    log: Its metrics.
  """

  arm: str
  seed: int
  start: float
  accuracy: float
  training: float | None
  seconds: float
  log: pathlib.Path


class StudyError(ValueError):
  """What a user can mend: a folder of another study, a study without start."""


def with_study(base: Mapping[str, Any], study: Mapping[str, Any]) -> Any:
  """`base` with a section `study`: the keys that a study's config may have."""
  config = config_lib.updated(base, {})
  with config.unlocked():
    config.study = study
  return config


def plan(
    config: Mapping[str, Any], base: Mapping[str, Any]
) -> tuple[StudyOptions, dict[tuple[str, int], Any]]:
  """The study's options and the config of every run, all of them checked.

  Args:
    config: A run's config with a section `study`; `run_dir` is the folder of
      the study.
    base: `configs.base.get_config()`.

  Returns:
    (options, {(arm, seed): config}); the arm COLD_START comes first.

  Raises:
    ValueError: naming the arm whose config a room refuses, and why.
  """
  options = config_lib.section(config['study'], StudyOptions)
  common = {
      key: value
      for key, value in config_lib.flatten(config).items()
      if not key.startswith('study.')
  }
  if not config['sft']['steps'] + config['sft']['exercise_steps']:
    raise StudyError(
        'a study compares with its cold start: give sft.steps or'
        ' sft.exercise_steps'
    )
  root = pathlib.Path(config['run_dir'])
  configs = {}
  for name, changes in {COLD_START: {}, **options.chosen()}.items():
    for seed in options.seeds:
      own = {'seed': seed, 'run_dir': str(root / name / f'seed_{seed}')}
      try:
        made = config_lib.updated(base, {**common, **changes, **own})
        if seed == options.seeds[0]:  # it breaks no rule, whatever it is
          settings_lib.resolve(made, base)
      except ValueError as error:
        raise ValueError(f'study arm {name!r}: {error}') from error
      configs[name, seed] = made
  return options, configs


def run_study(
    configs: Mapping[tuple[str, int], Any],
    command: Callable[[pathlib.Path], Sequence[str]],
    say: Callable[[str], None] = print,
    jobs: int = 1,
) -> list[Result] | None:
  """Runs what is not finished, seed by seed.

  Args:
    configs: From `plan`.
    command: Gives the command line that works on a run's folder, in which
      its config.json lies; one of arm COLD_START ends after the cold start.
    say: Tells the progress, a line at a time.
    jobs: Processes at a time.

  Returns:
    What is finished, in the order of `configs`; None when interrupted.

  Raises:
    StudyError: a folder holds a run of another config.
    ValueError: more jobs than cores.
  """
  folders = {
      key: pathlib.Path(config['run_dir']) for key, config in configs.items()
  }
  for key, config in configs.items():
    taken = config_lib.claim(folders[key], config, 'study', _FREE)
    if taken:
      raise StudyError(taken)
  waiting = sorted(configs, key=lambda key: key[1])
  heads = {
      (name, seed): f'[{place}/{len(configs)}] {name}, seed {seed}'
      for place, (name, seed) in enumerate(waiting, start=1)
  }
  with processes.Pool(jobs) as pool:
    while waiting or pool.running:
      key = _next(waiting, pool.running) if pool.free else None
      if key is None:
        if not pool.running:
          break  # asked to end
        key, seconds = pool.wait()
        if pool.asked and not _finished(key, folders[key]):
          waiting.append(key)  # it has saved, and is to go on another time
        else:
          say(_outcome(heads[key], key, folders[key], seconds))
        continue
      waiting.remove(key)
      if _finished(key, folders[key]):
        say(f'{heads[key]}: finished before')
        continue
      if key[0] != COLD_START:
        start = COLD_START, key[1]
        if not _finished(start, folders[start]):
          say(f'{heads[key]}: left out, as its cold start has failed')
          continue
        _copy_start(folders[start], folders[key])
      output = folders[key] / 'output.txt'
      pool.start(key, command(folders[key]), output)
    if waiting:
      say('Interrupted. To go on, run the same command again.')
      return None
  return [
      _result(key, folders[key])
      for key in configs
      if key[0] != COLD_START and _finished(key, folders[key])
  ]


def _next(
    waiting: Sequence[tuple[str, int]], running: Collection[tuple[str, int]]
) -> tuple[str, int] | None:
  """The first run whose cold start has ended; None if all wait for theirs."""
  for name, seed in waiting:
    start = COLD_START, seed
    if name == COLD_START or not (start in waiting or start in running):
      return name, seed
  return None


def _outcome(
    head: str, key: tuple[str, int], folder: pathlib.Path, seconds: float
) -> str:
  """What to say of a run that has ended."""
  if not _finished(key, folder):
    return f'{head}: failed after {seconds:.0f} s, see {folder}/output.txt'
  if key[0] == COLD_START:
    return f'{head}: {seconds:.0f} s'
  result = _result(key, folder)
  return f'{head}: {result.start:.3f} -> {result.accuracy:.3f}, {seconds:.0f} s'


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other process works on the folder.

  A study that was killed leaves its last run working.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'lock', 'w', encoding='ascii') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _finished(key: tuple[str, int], folder: pathlib.Path) -> bool:
  if key[0] == COLD_START:
    return (folder / 'cold_start_evaluation' / 'final.json').exists()
  return (folder / 'summary.json').exists()


def _copy_start(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a trained cold start and its tokenizer, each whole or not at all."""
  for name in ('tokenizer.model', COLD_START):
    if not (source / name).exists() or (target / name).exists():
      continue
    partial = target / f'{name}.partial'
    if partial.is_dir():
      shutil.rmtree(partial)
    copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
    copy(source / name, partial)
    os.replace(partial, target / name)


def _result(key: tuple[str, int], folder: pathlib.Path) -> Result:
  summary = json.loads((folder / 'summary.json').read_text(encoding='utf-8'))
  seconds = summary['seconds']['after RL']
  log = folder / 'rl' / 'metrics.jsonl'
  return Result(
      arm=key[0],
      seed=key[1],
      start=summary['accuracy']['cold start'],
      accuracy=summary['accuracy']['after RL'],
      training=study.mean_of(log, 'episode/accuracy'),
      seconds=seconds['rollout'] + seconds['update'],
      log=log,
  )


def write_results(
    folder: pathlib.Path,
    options: StudyOptions,
    results: Sequence[Result],
    config: Mapping[str, Any],
) -> str:
  """Writes table.md, results.json and curves.png; returns the table."""
  changes = options.chosen()
  rows = study.summarize(results, options.baseline, changes)
  problems = config['eval']['final_problems']
  lacking = study.missing(results, list(changes), options.seeds)
  table = study.markdown(rows, options.baseline, problems, lacking)
  logs = {
      arm: [r.log for r in results if r.arm == arm and r.log.exists()]
      for arm in changes
  }
  study.draw(logs, folder / 'curves.png', options.baseline)
  write_json(
      folder / 'results.json',
      {'problems': problems, 'arms': rows, 'missing': lacking},
  )
  with whole_file.replacing(folder / 'table.md') as partial:
    partial.write_text(table, encoding='utf-8')
  return table
