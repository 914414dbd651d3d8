"""Trains an agent as a config says; run it again to resume.

python -m experiments.train --config=configs/quickstart.py
python -m experiments.train --config=configs/quickstart.py --config.seed=1
"""

from agent_rl_jax.train import entry
from configs import base

_CONFIG = entry.define_config()


def main(argv):
  del argv
  settings = entry.resolve(_CONFIG.value, base.get_config())
  # Imported late: a mistake in the config is told before JAX starts.
  from agent_rl_jax.train import run

  entry.guard(lambda: run.run(_CONFIG.value, settings))


if __name__ == '__main__':
  entry.run(main, base.get_config())
