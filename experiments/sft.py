"""The cold start alone: supervised training on demonstrations.

python -m experiments.sft --config=configs/quickstart.py

The same stage, in the same folder, as in `experiments.train`, which goes on
from it when run on the same run folder.
"""

from agent_rl_jax.train import entry
from configs import base

_CONFIG = entry.define_config()


def main(argv):
  del argv
  settings = entry.resolve(_CONFIG.value, base.get_config())
  if not settings.sft.exercise_steps + settings.sft.steps:
    entry.fail(
        'this config has no cold start: set sft.exercise_steps or sft.steps'
    )
  from agent_rl_jax.train import run

  entry.guard(lambda: run.run(_CONFIG.value, settings, cold_start_only=True))


if __name__ == '__main__':
  entry.run(main, base.get_config())
