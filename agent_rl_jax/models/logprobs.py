"""Teacher-forced log-probs and entropies, with the head in pieces.

The shift by one happens here and nowhere else (`shifted`): `logprobs[t]`
belongs to `tokens[t]` and is predicted from position t-1 of the same segment;
the first token of a segment has none and gets 0.  Full logits never exist: each
piece of the time axis is rematerialized in the backward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array


def num_pieces(config: ModelConfig, batch: int, length: int) -> int:
  """Pieces of the time axis so that one piece of logits fits the target."""
  total = batch * length * config.vocab_size * 4
  wanted = -(-total // (config.head_megabytes * 2**20))
  for pieces in range(min(wanted, length), length):
    if length % pieces == 0:
      return pieces
  return length


def scaled_log_softmax(logits: Array, temperature: Array | float) -> Array:
  """log softmax(logits / temperature); temperature 0 means greedy, whose

  log-probs are reported at temperature 1.
  """
  temperature = jnp.asarray(temperature, jnp.float32)
  scale = jnp.where(temperature > 0, temperature, 1.0)
  return jax.nn.log_softmax(logits / scale, axis=-1)


def shifted(x_BxT: Array, segment_BxT: Array) -> Array:
  """What position t-1 says about token t, [B, T]: x moved one to the right.

  0 where a segment begins and on padding.
  """
  inside = (segment_BxT[:, 1:] == segment_BxT[:, :-1]) & (
      segment_BxT[:, 1:] > 0
  )
  return jnp.pad(jnp.where(inside, x_BxT[:, :-1], 0.0), ((0, 0), (1, 0)))


def token_logprobs(
    config: ModelConfig,
    params: policy.Params,
    tokens_BxT: Array,
    positions_BxT: Array,
    segment_BxT: Array,
    temperature: Array | float = 1.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> tuple[Array, Array]:
  """Log-prob and entropy of the distribution each token was drawn from.

  Args:
    config: Shape of the policy.
    params: Parameters.
    tokens_BxT, positions_BxT, segment_BxT: As in `policy.hidden`.
    temperature: Scalar; divides the logits as it did in sampling.
    part: Mesh and rules.

  Returns:
    (logprobs_BxT, entropy_BxT), float32, 0 where a segment begins and on
    padding; the entropy (nats) is that of the distribution of `tokens[t]`.
  """
  x = policy.hidden(
      config, params, tokens_BxT, positions_BxT, segment_BxT, part
  )
  return hidden_logprobs(
      config, params, x, tokens_BxT, segment_BxT, temperature, part
  )


def hidden_logprobs(
    config: ModelConfig,
    params: policy.Params,
    hidden_BxTxD: Array,
    tokens_BxT: Array,
    segment_BxT: Array,
    temperature: Array | float = 1.0,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> tuple[Array, Array]:
  """`token_logprobs` from final hidden states that are there already."""
  b, t = tokens_BxT.shape
  # Position t-1 predicts token t; what position T-1 predicts is dropped.
  targets = jnp.concatenate([tokens_BxT[:, 1:], tokens_BxT[:, :1]], axis=1)
  pieces = num_pieces(config, b, t)

  def piece(xs):
    hidden, target = xs
    logits = policy.logits(config, params, hidden, part)
    logp = scaled_log_softmax(logits, temperature)
    chosen = jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return chosen, entropy

  if pieces == 1:
    chosen, entropy = piece((hidden_BxTxD, targets))
  else:
    cut = lambda a: jnp.moveaxis(
        a.reshape(b, pieces, t // pieces, *a.shape[2:]), 1, 0
    )
    chosen, entropy = jax.lax.map(
        jax.checkpoint(piece), (cut(hidden_BxTxD), cut(targets))
    )
    join = lambda a: jnp.moveaxis(a, 0, 1).reshape(b, t)
    chosen, entropy = join(chosen), join(entropy)

  return shifted(chosen, segment_BxT), shifted(entropy, segment_BxT)
