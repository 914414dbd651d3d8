"""Type a problem and watch the agent work.

python -m experiments.play --run_dir=runs/quickstart

Tokens are shown as they were sampled: what the agent wrote, and what the tool
answered.  An empty line draws a held-out problem; Ctrl-D ends.
"""

from absl import flags

from agent_rl_jax.train import entry
from configs import base

_RUN = flags.DEFINE_string('run_dir', None, 'Folder of a run.', required=True)
_STAGE = flags.DEFINE_string('stage', 'rl', 'rl | without_tool | cold_start')
_STEP = flags.DEFINE_integer('step', None, 'Checkpoint; the newest by default.')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy.')


def main(argv):
  del argv
  from agent_rl_jax.train import playback

  def work():
    loaded = playback.load(
        _RUN.value, base.get_config(), _STAGE.value, _STEP.value
    )
    with loaded:
      playback.play(loaded, _TEMPERATURE.value)

  entry.guard(work)


if __name__ == '__main__':
  entry.run(main, base.get_config())
