"""One arm of RL: iterations, evaluations, checkpoints, samples to read.

An arm is a policy trained in one environment from one start.  Leaves out the
iteration itself (`loop.py`) and the comparison of arms (`run.py`).  Invariant:
an arm that was killed anywhere and run again leaves the files and parameters
of one that was not, times and memory aside.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_rl_jax.data.tasks import make_stream
from agent_rl_jax.rollout.engine import Engine, Interrupted
from agent_rl_jax.train import config as config_lib
from agent_rl_jax.train import metrics as metrics_lib
from agent_rl_jax.train.buffer import Kept
from agent_rl_jax.train.collect import Collector
from agent_rl_jax.train.evaluate import Scored, evaluate
from agent_rl_jax.train.loop import Iteration, Trainer
from agent_rl_jax.train.report.html import write_trajectories
from agent_rl_jax.train.report.trajectories import make_record
from agent_rl_jax.train.stage import Stage, write_json
from agent_rl_jax.train.watch import Watch

# What an evaluation adds to the metrics of its iteration.
_EVALUATED = ('episode/accuracy', 'reward/total', 'episode/tool_calls')

# What a finished arm's result does not depend on.
_FREE = ('run_dir', 'report', 'checkpoint')


@dataclasses.dataclass(frozen=True)
class ArmResult:
  """Where an arm ended.

  Attributes:
    accuracy: On the final held-out problems, greedy.
    metrics: All episode metrics of that evaluation.
    first_reward: Mean reward sampled before the first update.
    seconds: Wall-clock of its parts, over all processes that worked on it.
  """

  accuracy: float
  metrics: dict[str, float]
  first_reward: float | None
  seconds: dict[str, float]


class Arm:
  """Trains one policy in one environment, resumably."""

  def __init__(
      self,
      trainer: Trainer,
      name: str,
      engine: Engine,
      config: Mapping[str, Any],
      compiles: metrics_lib.CompileCounter,
      *,
      poor_start: bool = False,
  ):
    """Makes an arm; nothing runs yet.

    Args:
      trainer: Compiled functions.
      name: Folder of the arm.
      engine: Plays its episodes, in its environment.
      config: The run's config, for what a continuation depends on.
      compiles: Counts backend compiles of the process.
      poor_start: Whether little reward before RL is by design, and not to be
        warned of: an environment without what the start was taught to use.
    """
    parts = trainer.parts
    settings = parts.settings
    self.trainer, self.engine, self.settings = trainer, engine, settings
    self._compiles = compiles
    self._poor_start = poor_start
    self.stage = Stage(
        settings,
        name,
        settings.train.iterations,
        settings.checkpoint.every,
        {
            **config_lib.continuation(config),
            'arm': name,
            'tokenizer': parts.tokenizer.digest,
        },
        parts.stop,
    )
    self.rewards = parts.rewards()
    self.tasks = make_stream(settings.data, seed=settings.seed)
    self.collector = Collector(parts, engine, self.rewards, self.tasks)
    held_out = make_stream(settings.eval_data, seed=settings.seed)
    wanted = max(settings.eval.problems, settings.eval.final_problems)
    if wanted > len(held_out.source):
      print(
          f'{held_out.source.name} has {len(held_out.source)} problems, fewer'
          f' than the {wanted} of eval.problems and eval.final_problems: all'
          ' are used',
          flush=True,
      )
    self.held_out = held_out.take(min(wanted, len(held_out.source)))
    self._first_reward: float | None = None
    self.watch = Watch(settings.watch)
    self._digest = config_lib.digest(config, _FREE)

  def run(self, start: Callable[[], Any]) -> ArmResult:
    """Trains to the end and evaluates.

    Args:
      start: Gives the parameters to begin from; called only for a new arm.

    Raises:
      Interrupted: asked to end; the last whole iteration is saved.
    """
    stage = self.stage
    final = stage.folder / 'final.json'
    try:
      if final.exists():
        result = json.loads(final.read_text(encoding='utf-8'))
        if result.pop('digest') == self._digest:
          return ArmResult(**result)
      found = stage.restore(self.trainer.abstract())
      if found is None:
        state, carried = self.trainer.init(start())
      else:
        (state, carried), host = found
        self.tasks.restore(host['tasks'])
        self.rewards.restore(host['rewards'])
        self.collector.kept = Kept.from_files(stage.files())
        self._first_reward = host['first_reward']
        self.watch.restore(host['watch'])
      stage.begin()
      before = self._compiles.seconds
      watch = metrics_lib.Stopwatch()
      with watch.part('start_up_s'):
        state, carried = self.trainer.warm_up(state, carried)
      stage.seconds['start-up'] += watch.take()['time/start_up_s']
      stage.seconds['compile'] += self._compiles.seconds - before
      state = self._train(state, carried)
      scored = self._evaluate(state, self.settings.eval.final_problems)
      self._write_sample('final', scored, None)
      metrics = scored.metrics()
      result = ArmResult(
          accuracy=metrics['episode/accuracy'],
          metrics=metrics,
          first_reward=self._first_reward,
          seconds=dict(stage.seconds),
      )
      write_json(final, {**dataclasses.asdict(result), 'digest': self._digest})
      return result
    finally:
      stage.close()

  def _host_state(self) -> dict[str, Any]:
    return {
        'tasks': self.tasks.state(),
        'rewards': self.rewards.state(),
        'first_reward': self._first_reward,
        'watch': self.watch.state(),
    }

  def _save(self, state: Any, carried: Any, force: bool = False) -> None:
    files = self.collector.kept.files
    self.stage.save((state, carried), self._host_state(), files, force)

  def _train(self, state: Any, carried: Any) -> Any:
    stage, publish = self.stage, self.trainer.parts.publish
    warm = self._compiles.count
    # A process that ended during an evaluation has left it to this one.
    self._evaluate_if_due(state, carried)
    while not (stage.done or self.watch.stop):
      iteration = stage.step
      # What an interrupt in this rollout goes back to.
      boundary, kept = self._host_state(), self.collector.kept
      try:
        stage.check_stop()
        collected = self.collector.collect(
            publish(state.trainable['policy']), iteration
        )
      except Interrupted:
        stage.save((state, carried), boundary, kept.files, force=True)
        raise
      for note in collected.notes:
        stage.say(note)
      state, carried, done = self.trainer.iterate(
          state, carried, collected, iteration
      )
      metrics = dict(done.metrics)
      self._account(metrics, done)
      self._tell(self.watch.step(metrics))
      metrics['watch/signs'] = float(len(self.watch.told))
      metrics['compile/after_warm_up'] = float(self._compiles.count - warm)
      metrics['time/compiles_in_all'] = float(self._compiles.count)
      self._sample(iteration, done)
      stage.log(metrics)
      self._save(state, carried)
      self._evaluate_if_due(state, carried)
    if self.watch.stop:
      self._save(state, carried, force=True)
    return state

  def _evaluate_if_due(self, state: Any, carried: Any) -> None:
    """Evaluates after every so many iterations, unless the log has it."""
    stage, every = self.stage, self.settings.eval.every
    if not (every and stage.step and stage.step % every == 0):
      return
    accuracy = stage.noted('eval/accuracy')
    if accuracy is not None:
      # The checkpoint is older than its evaluation, and so is the watch.
      self._tell(self.watch.validation(stage.step, accuracy))
      return
    try:
      values = self._evaluate(state, self.settings.eval.problems).metrics()
    except Interrupted:
      self._save(state, carried, force=True)
      raise
    stage.note(
        {f'eval/{name.partition("/")[2]}': values[name] for name in _EVALUATED}
    )
    self._tell(self.watch.validation(stage.step, values['episode/accuracy']))

  def _tell(self, lines: Sequence[str]) -> None:
    for line in lines:
      self.stage.say(line)

  def _account(self, metrics: dict[str, float], done: Iteration) -> None:
    """Adds up the time of the parts; warns of what went wrong."""
    self._tell_failures(done.played)
    seconds = self.stage.seconds
    seconds['rollout'] += metrics['time/rollout_s']
    seconds['update'] += metrics['time/update_s']
    seconds['tools'] += sum(
        result.seconds
        for episode in done.played.episodes
        for turn in episode.turns
        for result in turn.tool_results
    )
    if self._first_reward is None:
      self._first_reward = metrics['reward/total']
      floor = self.settings.sft.warn_below
      low = self._first_reward < floor and not self._poor_start
      if self.settings.rollout.temperature > 0 and low:
        self.stage.say(
            f'warning: the policy samples a mean reward of'
            f' {self._first_reward:.3f} before RL, below sft.warn_below ='
            f' {floor}; with so little to reinforce it may collapse. Train the'
            ' cold start longer or make its demonstrations better.'
        )

  def _evaluate(self, state: Any, problems: int) -> Scored:
    watch = metrics_lib.Stopwatch()
    options = self.settings.eval
    with watch.part('s'):
      params = self.trainer.parts.publish(state.trainable['policy'])
      scored, _ = evaluate(
          self.engine,
          params,
          self.held_out[:problems],
          self.trainer.parts.rewards(),
          self.trainer.parts.judges,
          patience=self.settings.rollout.step_timeout,
          samples=options.samples,
          temperature=options.temperature,
          version=self.stage.step,
      )
    self.stage.seconds['evaluation'] += watch.take()['time/s']
    self._tell_failures(scored)
    return scored

  def _tell_failures(self, scored: Scored) -> None:
    """Says how many episodes infrastructure failed, and why one did."""
    failed = [e for e in scored.episodes if e.status.failed]
    if failed:
      self.stage.say(
          f'{len(failed)} of {len(scored.episodes)} episodes failed and count'
          f' nowhere; the first: {failed[0].status.value}: {failed[0].detail}'
      )

  def _sample(self, iteration: int, done: Iteration) -> None:
    every = self.settings.report.trajectories_every
    last = iteration + 1 == self.stage.total
    if every and (iteration % every == 0 or last):
      self._write_sample(
          f'iteration_{iteration + 1:06d}', done.scored, done.advantages
      )

  def _write_sample(self, name: str, scored: Scored, advantages: Any) -> None:
    """Writes episodes to read, as JSON lines and as a page."""
    report = self.settings.report
    if not report.trajectories:
      return
    records = []
    row = 0
    for i, episode in enumerate(scored.episodes[: report.trajectories]):
      rows = range(row, row + len(episode.rows))
      row += len(episode.rows)
      records.append(
          make_record(
              episode,
              self.trainer.parts.tokenizer,
              total=float(scored.returns[i]),
              advantages=None
              if advantages is None
              else [advantages[r] for r in rows],
          )
      )
    folder = self.stage.folder / 'trajectories'
    write_json(folder / f'{name}.json', [r.to_json() for r in records])
    if report.html:
      title = f'{self.stage.name}, {name.replace("_", " ")}'
      write_trajectories(folder / f'{name}.html', records, title)
