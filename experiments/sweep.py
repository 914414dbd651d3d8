"""Runs a study: several algorithms under several seeds; run again to resume.

python -m experiments.sweep --config=configs/studies/algorithms.py

A part of it, in minutes:

python -m experiments.sweep --config=configs/studies/algorithms.py \
    --config.run_dir=runs/small_study --config.study.seeds='(0,)' \
    --config.study.only="('grpo_gspo',)" --config.train.iterations=5

Writes table.md, results.json and curves.png into the study's folder.
"""

import os
import pathlib
import sys

from absl import flags

from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import entry, sweep
from configs import base
from configs.studies import algorithms

_CONFIG = entry.define_config()
_RUN = flags.DEFINE_string(
    'run', '', 'Work on this run of a study; given by the study itself.'
)


def _command(folder: pathlib.Path) -> list[str]:
  return [sys.executable, '-m', 'experiments.sweep', f'--run={folder}']


def _work(folder: pathlib.Path) -> None:
  """One run, in its own process."""
  from agent_rl_jax.train import run

  config = config_lib.load(folder / 'config.json', base.get_config())
  settings = entry.resolve(config, base.get_config())
  with sweep.alone(folder):
    cold_start_only = folder.parent.name == sweep.COLD_START
    entry.guard(lambda: run.run(config, settings, cold_start_only))


def main(argv):
  del argv
  if _RUN.value:
    return _work(pathlib.Path(_RUN.value))
  config = _CONFIG.value
  if config is None:
    entry.fail('give a config: --config=configs/studies/NAME.py')
  try:
    options, configs = sweep.plan(config, base.get_config())
    folder = pathlib.Path(config.run_dir).absolute()
    # The runs share most programs: each is compiled once for the study.
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'compiled'))
    results = sweep.run_study(configs, _command, jobs=options.jobs)
  except ValueError as error:
    entry.fail(str(error))
  if results is None:
    sys.exit(1)
  print(sweep.write_results(folder, options, results, config))
  if len(results) < len(configs) - len(options.seeds):
    entry.fail('some runs failed; run the command again to try them once more')


if __name__ == '__main__':
  entry.run(main, algorithms.get_config())
