"""Which slot an episode gets, and where its prompt's cache comes from.

A group lives on one data shard, so that its prompt is prefilled once and
forked by local copies.  The choice depends on timing; nothing that an episode
samples depends on the choice.
"""

from __future__ import annotations

import collections

from agent_rl_jax.rollout.live import Live


class Admission:
  """Free slots by shard, and the running rows that hold each prompt."""

  def __init__(self, slots: int, shards: int):
    self._per_shard = slots // shards
    self._free = [
        collections.deque(range(s * self._per_shard, (s + 1) * self._per_shard))
        for s in range(shards)
    ]
    self._group_shard: dict[int, int] = {}
    self._pending = [0] * shards  # episodes that will still need the shard
    # Insertion ordered: the first holder was prefilled, or forked in an
    # earlier round, so it can be copied from before this round's forks run.
    self._holders: dict[tuple[int, bytes], dict[int, None]] = {}

  def shard_of(self, slot: int) -> int:
    return slot // self._per_shard

  def local(self, slot: int) -> int:
    return slot % self._per_shard

  def expect(self, group: int, members: int) -> None:
    """Assigns a group to the shard with the least to do."""
    shard = min(range(len(self._free)), key=lambda s: (self._pending[s], s))
    self._group_shard[group] = shard
    self._pending[shard] += members

  def admit(self, live: Live) -> tuple[int, int | None] | None:
    """(slot, running slot to fork the prompt from or None); None when full.

    The slot counts as a holder of its prompt from now on: the caller fills
    its cache before anything decodes.
    """
    shard = self._group_shard[live.request.group]
    if not self._free[shard]:
      return None
    slot = self._free[shard].popleft()
    holders = self._holders.setdefault((shard, live.prompt.tobytes()), {})
    source = next(iter(holders), None)
    holders[slot] = None
    live.slot = slot
    return slot, source

  def release(self, live: Live) -> None:
    """Frees the episode's slot."""
    shard = self.shard_of(live.slot)
    key = (shard, live.prompt.tobytes())
    del self._holders[key][live.slot]
    if not self._holders[key]:
      del self._holders[key]
    self._free[shard].append(live.slot)
    self._pending[shard] -= 1

  def dropped(self, group: int) -> None:
    """An episode that ended before it ever got a slot."""
    self._pending[self._group_shard[group]] -= 1
