"""What outlives an iteration: surplus groups, and groups to train on again.

Two stores, both of whole groups with the policy version that sampled them.
Surplus is what resampling played beyond a full batch; all of it enters the
next one, before anything is replayed, so that it is never older than an
iteration.  The replay buffer holds groups that were trained on already.

ZeroTIR's replay buffer (Mai et al. 2025, arXiv 2505.07773) is a filter on the
way into the buffer, group accuracy between 0.2 and 0.8, and its first release
carries what a batch leaves over to the next update: here that is the filter
'accuracy_band' and its surplus.  StarPO (Wang et al. 2025, arXiv 2504.20073)
updates several times on one set of rollouts, and reports fresh ones to be
best; its code keeps none of them: here that is `train.epochs`, or replay with
a small `max_age`.  Neither draws from a long history, as off-policy methods do.

Leaves out what a stale episode is worth: with train.old_logprobs='recompute'
old log-probs are those of the policy at the start of the update and sampler
log-probs stay those of the policy that sampled, so that `correction` sees the
staleness; with 'sampler' the ratio of the loss holds all of it.  Invariant: a
draw is named by (seed, 'replay', iteration), so that nothing but the contents
needs to be saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from agent_rl_jax.data.named import named_generator
from agent_rl_jax.train import episodes_file
from agent_rl_jax.train.group import Group
from agent_rl_jax.train.options import ReplayOptions


@dataclasses.dataclass(frozen=True)
class Kept:
  """Both stores, oldest first."""

  surplus: tuple[Group, ...] = ()
  replay: tuple[Group, ...] = ()

  def files(self) -> dict[str, bytes]:
    """For the checkpoint; an empty store has no file."""
    return {
        f'{name}.npz': episodes_file.pack(groups)
        for name, groups in (('surplus', self.surplus), ('replay', self.replay))
        if groups
    }

  @classmethod
  def from_files(cls, files: Mapping[str, bytes]) -> Kept:
    """What `files` gave."""
    read = lambda name: (
        episodes_file.unpack(files[name]) if name in files else ()
    )
    return cls(surplus=read('surplus.npz'), replay=read('replay.npz'))


def draw(
    replay: Sequence[Group],
    most: int,
    options: ReplayOptions,
    iteration: int,
    seed: int,
) -> list[Group]:
  """Up to `most` different groups, none older than `max_age`, oldest first."""
  fit = [g for g in replay if iteration - g.version <= options.max_age]
  count = min(most, len(fit))
  if not count:
    return []
  generator = named_generator(seed, 'replay', iteration)
  chosen = generator.choice(len(fit), count, replace=False)
  return [fit[i] for i in sorted(chosen)]


def admit(
    replay: Sequence[Group],
    trained: Sequence[Group],
    options: ReplayOptions,
    iteration: int,
) -> tuple[Group, ...]:
  """The buffer after an iteration that trained on fresh groups.

  The oldest make room, and those that the next iteration would find too old
  leave.  A group of failures alone has nothing to teach and is not admitted.
  """
  if not options.capacity:
    return ()
  new = [
      g
      for g in trained
      if g.valid.any() and (options.admit == 'kept' or g.mixed)
  ]
  fit = [
      g for g in (*replay, *new) if iteration + 1 - g.version <= options.max_age
  ]
  return tuple(fit[-options.capacity :])
