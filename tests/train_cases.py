"""Small batches and models for the tests of the train room."""

import numpy as np

from agent_rl_jax.batch import Advantages, Scores, TrajectoryBatch
from agent_rl_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=32,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    qk_norm=True,
    tied_head=False,
)
ROWS, LENGTH = 12, 16


def trajectory(seed=0, rows=ROWS, length=LENGTH, group_size=3, padding=2):
  """Rows with a prompt, an action, an observation and a second action.

  The last `padding` rows are empty.
  """
  rng = np.random.default_rng(seed)
  lengths = rng.integers(6, length + 1, rows)
  lengths[rows - padding :] = 0
  place = np.arange(length)[None]
  first = rng.integers(1, 4, rows)[:, None]
  second = first + rng.integers(1, 4, rows)[:, None]
  third = second + rng.integers(1, 3, rows)[:, None]
  inside = place < lengths[:, None]
  mask = ((place >= first) & (place < second) | (place >= third)) & inside
  random = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  valid = lengths > 0
  return TrajectoryBatch(
      tokens=np.where(
          inside, rng.integers(1, CONFIG.vocab_size, (rows, length)), 0
      ).astype(np.int32),
      action_mask=mask,
      length=lengths.astype(np.int32),
      sampler_logprobs=np.where(mask, -np.abs(random(rows, length)), 0).astype(
          np.float32
      ),
      policy_version=np.zeros((rows, length), np.int32),
      turn=np.zeros((rows, length), np.int32),
      episode=np.arange(rows, dtype=np.int32),
      group=(np.arange(rows) // group_size).astype(np.int32),
      valid=valid,
      weight=valid.astype(np.float32),
      components=random(rows, 1),
      returns=random(rows),
      metric=random(rows),
      turn_rewards=np.zeros((rows, 2), np.float32),
      anchor=np.full((rows, 2), -1, np.int32),
      turn_mask=np.ones((rows, 2), bool),
  )


def scored(batch, seed=1, reference=False):
  """(Scores, Advantages) with old log-probs near the sampler's."""
  rng = np.random.default_rng(seed)
  shape = batch.tokens.shape
  near = lambda: (
      batch.sampler_logprobs + 0.1 * rng.standard_normal(shape)
  ).astype(np.float32)
  advantages = rng.standard_normal(shape[0])[:, None] * batch.action_mask
  return (
      Scores(near(), near() if reference else None),
      Advantages(advantages.astype(np.float32)),
  )
