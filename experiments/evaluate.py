"""Scores a checkpoint of a run on held-out problems.

python -m experiments.evaluate --run_dir=runs/quickstart --stage=rl

Prints the figures and writes them, with episodes to read, into the run
folder's `evaluations/`.
"""

from absl import flags

from agent_rl_jax.train import entry
from configs import base

_RUN = flags.DEFINE_string('run_dir', None, 'Folder of a run.', required=True)
_STAGE = flags.DEFINE_string('stage', 'rl', 'rl | without_tool | cold_start')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint; the newest by default.')
_PROBLEMS = flags.DEFINE_integer('problems', None, 'Held-out problems.')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'Episodes of each problem.')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy.')


def main(argv):
  del argv
  from agent_rl_jax.train import playback

  def work():
    loaded = playback.load(
        _RUN.value, base.get_config(), _STAGE.value, _STEP.value
    )
    with loaded:
      playback.score_checkpoint(
          loaded, _PROBLEMS.value, _SAMPLES.value, _TEMPERATURE.value
      )

  entry.guard(work)


if __name__ == '__main__':
  entry.run(main, base.get_config())
