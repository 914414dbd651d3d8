"""The critic: a value head on the policy's trunk, or on a trunk of its own.

Its parameters are {'head': {'kernel', 'bias'}} when it shares the policy's
trunk, and {'trunk', 'head'} otherwise.  The head is float32 and begins at
zero, so that a fresh critic says 0 everywhere.  Leaves out the value loss
(`algorithms/value.py`).  Invariant: `values[t]` belongs to `tokens[t]` as its
log-prob does: it is read at position t-1 of the same segment, so it is the
value of the state in which token t is chosen, before the token is known.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agent_rl_jax.models import policy
from agent_rl_jax.models.config import ModelConfig
from agent_rl_jax.models.logprobs import (
    hidden_logprobs,
    shifted,
    token_logprobs,
)
from agent_rl_jax.parallel.rules import Partition

Array = jax.Array

CRITICS = ('none', 'own', 'shared')


def _trunk(tree: Any) -> Any:
  """A policy's tree without its output head; a tied one is the embedding."""
  return {name: part for name, part in tree.items() if name != 'head'}


def init(config: ModelConfig, kind: str, params: policy.Params) -> Any:
  """A fresh critic beside the policy `params`; traceable.

  Args:
    config: Shape of the policy, and of a trunk of the critic's own.
    kind: 'own' begins from a copy of the policy's trunk; 'shared' has none.
    params: Parameters of the policy.
  """
  critic = {
      'head': {
          'kernel': jnp.zeros((config.width,), jnp.float32),
          'bias': jnp.zeros((), jnp.float32),
      }
  }
  if kind == 'own':
    critic['trunk'] = jax.tree.map(jnp.copy, _trunk(params))
  return critic


def axes(config: ModelConfig, kind: str) -> Any:
  """Logical axis names of what `init` gives; the head is on every device."""
  tree = {'head': {'kernel': (None,), 'bias': ()}}
  if kind == 'own':
    tree['trunk'] = _trunk(policy.axes(config))
  return tree


def hidden_values(head: Any, hidden_BxTxD: Array, segment_BxT: Array) -> Array:
  """Values [B, T], float32, from final hidden states; 0 where a segment

  begins and on padding.
  """
  # A sum and no matmul, which would round float32 on some accelerators.
  kernel = head['kernel'].astype(jnp.float32)[None, None]
  values = jnp.sum(hidden_BxTxD.astype(jnp.float32) * kernel, axis=-1)
  return shifted(values + head['bias'], segment_BxT)


def token_values(
    config: ModelConfig,
    trainable: dict[str, Any],
    tokens_BxT: Array,
    positions_BxT: Array,
    segment_BxT: Array,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> Array:
  """Values [B, T] alone, without log-probs.

  Args:
    config: Shape of the policy.
    trainable: {'policy', 'critic'}.
    tokens_BxT, positions_BxT, segment_BxT: As in `policy.hidden`.
    part: Mesh and rules.
  """
  critic = trainable['critic']
  trunk = critic.get('trunk', trainable['policy'])
  x = policy.hidden(config, trunk, tokens_BxT, positions_BxT, segment_BxT, part)
  return hidden_values(critic['head'], x, segment_BxT)


def logprobs_and_values(
    config: ModelConfig,
    trainable: dict[str, Any],
    tokens_BxT: Array,
    positions_BxT: Array,
    segment_BxT: Array,
    temperature: Array | float = 1.0,
    stop_gradient: bool = False,
    part: Partition = Partition(),  # noqa: B008 (frozen)
) -> tuple[Array, Array, Array | None]:
  """Log-probs and entropies of the policy, and the critic's values.

  One pass through a shared trunk gives both.

  Args:
    config: Shape of the policy.
    trainable: {'policy'}, and 'critic' if there is one.
    tokens_BxT, positions_BxT, segment_BxT: As in `policy.hidden`.
    temperature: As in `token_logprobs`; values do not depend on it.
    stop_gradient: Hide the shared trunk from the gradient of the values.
    part: Mesh and rules.

  Returns:
    (logprobs_BxT, entropy_BxT, values_BxT); None for values without a critic.
  """
  params, critic = trainable['policy'], trainable.get('critic')
  place = (tokens_BxT, positions_BxT, segment_BxT)
  if critic is None or 'trunk' in critic:
    logprobs, entropy = token_logprobs(
        config, params, *place, temperature, part
    )
    if critic is None:
      return logprobs, entropy, None
    return logprobs, entropy, token_values(config, trainable, *place, part)
  x = policy.hidden(config, params, *place, part)
  logprobs, entropy = hidden_logprobs(
      config, params, x, tokens_BxT, segment_BxT, temperature, part
  )
  seen = jax.lax.stop_gradient(x) if stop_gradient else x
  return logprobs, entropy, hidden_values(critic['head'], seen, segment_BxT)
