"""Sampling one token per row from named randomness.

The key of a token folds in (run, purpose, episode, row, position), so slot,
batch mates and tool latency cannot change what an episode samples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def sample(
    logits_BxV: Array, key_Bx2: Array, position_B: Array, temperature_B: Array
) -> tuple[Array, Array]:
  """Draws a token per row, or takes the likeliest where temperature is 0.

  Args:
    logits_BxV: float32.
    key_Bx2: uint32 key data of each row.
    position_B: Position the drawn token will stand at.
    temperature_B: Divides the logits.

  Returns:
    (tokens_B int32, logprobs_B float32): log-probs are those of the
    distribution sampled; of temperature 1 where it is 0.
  """
  scale = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
  logp = jax.nn.log_softmax(logits_BxV / scale, axis=-1)

  def noise(key, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.gumbel(key, logits_BxV.shape[1:], jnp.float32)

  gumbel = jax.vmap(noise)(key_Bx2, position_B)
  noisy = jnp.where(temperature_B[:, None] > 0, logp + gumbel, logp)
  tokens = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
  chosen = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen
