"""Sandbox for code that a model wrote; see options.py for the interface."""

from agent_rl_jax.tools.sandbox.choose import BACKENDS, make_sandbox
from agent_rl_jax.tools.sandbox.options import (
    Sandbox,
    SandboxOptions,
    SandboxResult,
    SandboxUnavailable,
)

__all__ = [
    'BACKENDS',
    'Sandbox',
    'SandboxOptions',
    'SandboxResult',
    'SandboxUnavailable',
    'make_sandbox',
]
