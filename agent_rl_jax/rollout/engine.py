"""BRIDGE: plays episodes by running chunks on device and tools on threads.

The engine admits requests into slots, dispatches the next chunk before it
reads the last report, and hands parsed actions to environments on an
executor's threads.  What it leaves out: rewards, training, and whatever an
environment does.  Invariant: the tokens, masks and log-probs of an episode
are a function of (weights, seed, purpose, uid, task, tool answers) only.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from agent_rl_jax.models import policy
from agent_rl_jax.rollout import slots as slots_lib
from agent_rl_jax.rollout.admission import Admission
from agent_rl_jax.rollout.decode import Programs, Report
from agent_rl_jax.rollout.env_calls import EnvCalls
from agent_rl_jax.rollout.live import Live, Phase, Request
from agent_rl_jax.rollout.options import RolloutOptions
from agent_rl_jax.rollout.slots import Purpose, SlotStatus
from agent_rl_jax.rollout.stats import RolloutStats
from agent_rl_jax.types import Episode, Status


class Interrupted(Exception):
  """A rollout was asked to stop; its episodes are lost, nothing else is."""


class Engine:
  """Runs batches of episodes through compiled programs and environments."""

  def __init__(
      self,
      programs: Programs,
      options: RolloutOptions,
      chat: Any,
      envs: Mapping[str, Any],
      executor: Any,
      seed: int,
      should_stop: Callable[[], bool] = lambda: False,
  ):
    """Makes an engine.

    Args:
      programs: Compiled functions (`decode.make_programs`).
      options: Shapes and limits.
      chat: A ChatFormat.
      envs: Environments by the name that tasks ask for.
      executor: Threads for resets and steps; the deadline owner.
      seed: The run's seed.
      should_stop: Polled between chunks; True ends a rollout at once.
    """
    self._programs = programs
    self._options = options
    self._chat = chat
    self._envs = dict(envs)
    self._executor = executor
    self._seed = seed
    self._should_stop = should_stop

  def with_envs(self, envs: Mapping[str, Any]) -> Engine:
    """The same compiled engine in other environments."""
    return Engine(
        self._programs,
        self._options,
        self._chat,
        envs,
        self._executor,
        self._seed,
        self._should_stop,
    )

  def warm_up(self, params: policy.Params) -> None:
    """Compiles every shape a rollout can need."""
    self._programs.warm_up(params)

  def rollout(
      self,
      params: policy.Params,
      requests: Sequence[Request],
      *,
      purpose: Purpose,
      version: int = 0,
      temperature: float | None = None,
      on_episode: Callable[[Episode], None] | None = None,
  ) -> tuple[list[Episode], RolloutStats]:
    """Plays every request to its end.

    Args:
      params: Rollout parameters, unstacked, on the rollout mesh.
      requests: Episodes to play; those of one group are best adjacent.
      purpose: Names the randomness.
      version: Updates the weights have seen, recorded in the episodes.
      temperature: Overrides the configured one; 0 is greedy, as requests may
        be by themselves.
      on_episode: Called on this thread as each episode ends.

    Returns:
      Episodes in the order of the requests, and counters.

    Raises:
      ValueError: a task asks for an environment that does not exist.
      Interrupted: `should_stop` said so.
    """
    for request in requests:
      if request.task.env not in self._envs:
        raise ValueError(
            f'task {request.task.uid!r} asks for environment'
            f' {request.task.env!r}; there are {sorted(self._envs)}'
        )
    if temperature is None:
      temperature = self._options.temperature
    run = _Run(self, params, requests, purpose, version, temperature)
    return run.play(on_episode)


class _Run:
  """State of one call of `Engine.rollout`."""

  def __init__(self, engine, params, requests, purpose, version, temperature):
    self.engine = engine
    self.programs = engine._programs
    self.options = engine._options
    self.params = params
    self.purpose = int(purpose)
    self.temperature = temperature
    self.stats = RolloutStats()
    self.lives = [Live(r, self.options, version) for r in requests]
    self.admission = Admission(self.options.slots, self.programs.shards)
    groups = collections.Counter(r.group for r in requests)
    for group, members in groups.items():
      self.admission.expect(group, members)
    self.waiting = collections.deque(self.lives)  # resets not yet started
    self.calls = EnvCalls(
        engine._envs,
        engine._chat,
        engine._executor,
        self.options.step_timeout,
        engine._seed,
        self.purpose,
    )
    self.ready: list[Live] = []
    self.owners: dict[int, Live] = {}
    self.finished = 0
    self.on_episode: Callable[[Episode], None] | None = None

  def play(self, on_episode) -> tuple[list[Episode], RolloutStats]:
    started = time.monotonic()
    self.on_episode = on_episode
    try:
      self._loop()
    finally:
      self.calls.abandon(
          [
              live
              for live in self.lives
              if live.phase is not Phase.FINISHED and live.ticket is not None
          ]
      )
    self.stats.seconds = time.monotonic() - started
    return [live.episode for live in self.lives], self.stats

  def _loop(self) -> None:
    slots = self.programs.init()
    pending: tuple[Report, dict] | None = None
    while self.finished < len(self.lives):
      if self.engine._should_stop():
        raise Interrupted
      self._start_resets()
      self._harvest()
      slots = self._apply_edits(slots)
      dispatched = None
      decoding = {
          slot: (live, live.writes)
          for slot, live in self.owners.items()
          if live.phase is Phase.DECODING
      }
      if decoding:
        slots, report = self.programs.decode(self.params, slots)
        dispatched = (report, decoding)
      if pending is not None:
        self._read(*pending)
      elif dispatched is None and self.calls and not self._can_admit():
        before = time.monotonic()
        self.calls.wait(0.2)
        self.stats.exposed += time.monotonic() - before
      pending = dispatched

  # Environment side.

  def _start_resets(self) -> None:
    """Keeps resets a little ahead of the slots."""
    ahead = 2 * self.options.slots
    while self.waiting and len(self.ready) + len(self.calls) < ahead:
      self.calls.reset(self.waiting.popleft())

  def _harvest(self) -> None:
    """Takes what the threads have finished."""
    for live, ticket in self.calls.harvest():
      if ticket.expired:
        self._finish(live, Status.TIMEOUT, 'environment step ran out of time')
      elif ticket.error is not None:
        error = ticket.error
        self._finish(live, Status.ENV_ERROR, f'{type(error).__name__}: {error}')
      elif live.phase is Phase.RESETTING:
        self._after_reset(live, *ticket.result)
      else:
        self._after_step(live, *ticket.result)

  def _after_reset(self, live: Live, observation, prompt) -> None:
    live.state_key = observation.state_key
    live.prompt = prompt
    if not 0 < len(prompt) <= self.options.max_len - 2:
      self._finish(
          live,
          Status.ENV_ERROR,
          f'the prompt has {len(prompt)} tokens; rollout.max_len ='
          f' {self.options.max_len} leaves room for 1 to'
          f' {self.options.max_len - 2}',
      )
      return
    live.phase = Phase.READY
    self.ready.append(live)

  def _after_step(self, live: Live, observation, ids) -> None:
    count = 0 if ids is None else len(ids)
    fits = live.length + count + 1 <= self.options.max_len
    over = observation.done or len(live.turns) >= self.options.max_turns
    if over or not fits or count == 0:
      live.end_turn(observation, live.length)
    if observation.done:
      self._finish(live, Status.DONE)
    elif over:
      self._finish(live, Status.MAX_TURNS)
    elif not fits:
      self._finish(live, Status.MAX_TOKENS)
    elif count == 0:
      self._finish(live, Status.ENV_ERROR, 'an observation without tokens')
    else:
      live.end_turn(observation, live.length + count)
      live.append(ids)
      if live.budget() <= 0:
        self._finish(live, Status.MAX_TOKENS)

  def _finish(self, live: Live, status: Status, detail: str = '') -> None:
    episode = live.finish(status, detail)
    if live.slot is None:
      self.admission.dropped(live.request.group)
    else:
      self.admission.release(live)
      self.owners.pop(live.slot, None)
    self.finished += 1
    self.calls.close(live)
    if self.on_episode is not None:
      self.on_episode(episode)

  # Device side.

  def _can_admit(self) -> bool:
    """Whether the next pass can do something without waiting."""
    return self.calls.any_done() or (bool(self.ready) and not self.owners)

  def _apply_edits(self, slots):
    """Writes new prompts and observations, and prefills what is long."""
    leaders, forks, long_rows, written = [], [], [], []
    still = []
    for live in self.ready:
      place = self.admission.admit(live)
      if place is None:
        still.append(live)
        continue
      slot, source = place
      self.owners[slot] = live
      live.append(live.prompt)
      written.append((live, live.prompt, 0))
      if source is not None:
        forks.append((source, slot))
      elif live.length > 1:
        leaders.append((slot, live.length - 1))
    self.ready = still
    for slot, live in self.owners.items():
      if live.phase is Phase.DECODING and live.turns:
        turn = live.turns[-1]
        count = turn.observation_stop - turn.action_stop
        if live.writes == len(live.turns) and count:
          written.append(
              (
                  live,
                  live.tokens[turn.action_stop : turn.observation_stop],
                  turn.action_stop,
              )
          )
          # Which way an observation goes depends on its length alone.
          if count > self.options.forced_limit:
            long_rows.append((slot, count))
    if not written:
      return slots
    slots = self.programs.edit(slots, self._edit(written))
    slots = self._extend(slots, leaders + long_rows)
    return self._fork(slots, forks)

  def _edit(self, written) -> slots_lib.Edit:
    longest = max(len(ids) for _, ids, _ in written)
    width = min(w for w in self.programs.widths if w >= longest)
    edit = slots_lib.empty_edit(self.options.slots, width)
    for live, ids, start in written:
      slot = live.slot
      edit.touch[slot] = True
      edit.fresh[slot] = live.writes == 0
      edit.start[slot] = start
      edit.count[slot] = len(ids)
      edit.tokens[slot, : len(ids)] = ids
      edit.status[slot] = SlotStatus.RUNNING
      edit.budget[slot] = live.budget()
      greedy = live.request.greedy
      purpose = int(Purpose.GREEDY) if greedy else self.purpose
      edit.name[slot] = (purpose, live.request.uid & 0xFFFFFFFF, 0)
      edit.temperature[slot] = 0.0 if greedy else self.temperature
      live.writes += 1
    return edit

  def _lanes(self, pairs: Sequence[tuple]) -> list[list[tuple]]:
    """Cuts (slot, ...) work into calls of at most R rows per shard."""
    shards = self.programs.shards
    queues: list[list] = [[] for _ in range(shards)]
    for pair in pairs:
      queues[self.admission.shard_of(pair[-1])].append(pair)
    rows = self.options.extend_rows
    calls = -(-max(map(len, queues), default=0) // rows)
    return [
        [queue[i * rows : (i + 1) * rows] for queue in queues]
        for i in range(calls)
    ]

  def _extend(self, slots, work: Sequence[tuple[int, int]]):
    """Prefills rows, longest first so that calls waste few lanes."""
    block = self.options.extend_block
    ordered = sorted(work, key=lambda item: (-item[1], item[0]))
    for call in self._lanes([(count, slot) for slot, count in ordered]):
      rounds = -(-max(c for lane in call for c, _ in lane) // block)
      for r in range(rounds):
        rows = [
            [self.admission.local(s) for c, s in lane if c > r * block]
            for lane in call
        ]
        slots = self.programs.extend(self.params, slots, self._pad(rows))
        self.stats.prefills += 1
    return slots

  def _fork(self, slots, pairs: Sequence[tuple[int, int]]):
    local = self.admission.local
    for call in self._lanes(pairs):
      sources = [[local(s) for s, _ in lane] for lane in call]
      targets = [[local(t) for _, t in lane] for lane in call]
      slots = self.programs.fork(slots, self._pad(sources), self._pad(targets))
    return slots

  def _pad(self, rows_by_shard: Sequence[Sequence[int]]) -> np.ndarray:
    """Local rows as one array of fixed shape, -1 where a lane is idle."""
    out = np.full((len(rows_by_shard), self.options.extend_rows), -1, np.int32)
    for shard, rows in enumerate(rows_by_shard):
      out[shard, : len(rows)] = rows
    return out.reshape(-1)

  def _read(self, report: Report, decoding: Mapping[int, tuple]) -> None:
    """Takes a chunk's tokens and hands finished actions to environments."""
    report = jax.device_get(report)
    self.stats.passes += int(report.steps)
    self.stats.busy += int(report.busy)
    for slot, (live, writes) in decoding.items():
      if live.phase is not Phase.DECODING or live.writes != writes:
        continue  # it had stopped before; the row has moved on since
      count = int(report.count[slot])
      live.sampled(report.tokens[slot, :count], report.logprobs[slot, :count])
      self.stats.tokens += count
      status = int(report.status[slot])
      if status != SlotStatus.RUNNING:
        stopped = status == SlotStatus.STOPPED
        self._act(live, 'stop' if stopped else 'length')

  def _act(self, live: Live, finish: str) -> None:
    """Parses a finished action and plays it."""
    try:
      action = self.engine._chat.action(live.action_ids, finish)
    except Exception as error:  # a parser's defect costs its own episode
      self._finish(live, Status.ENV_ERROR, f'{type(error).__name__}: {error}')
      return
    live.begin_turn(action, finish)
    if finish == 'length':
      self._finish(live, Status.MAX_TOKENS)
      return
    live.phase = Phase.STEPPING
    self.calls.step(live, action)
