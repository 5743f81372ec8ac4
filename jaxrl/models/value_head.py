"""The critic's head: one float32 number a position, exactly zero before training."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def value_head_init(hidden_size: int) -> dict[str, jax.Array]:
    """Kernel [hidden_size, 1] and bias [1], float32 zeros, so every first value is exactly 0."""
    return {
        "kernel": jnp.zeros((hidden_size, 1), jnp.float32),
        "bias": jnp.zeros((1,), jnp.float32),
    }


def value_head_apply(
    value_head: Mapping[str, Array], hidden: Float[Array, "*batch dim"]
) -> Float[Array, "*batch"]:
    """V = hidden · kernel + bias, in float32 for any dtype of hidden.

    Args:
        value_head: what `value_head_init` made, or its trained successor.
        hidden: states after the final norm.

    Returns:
        float32 values, reward units, one a position.

    >>> value_head_apply(value_head_init(2), jnp.ones((1, 3, 2))).tolist()
    [[0.0, 0.0, 0.0]]
    """
    kernel = jnp.asarray(value_head["kernel"], jnp.float32)[:, 0]
    bias = jnp.asarray(value_head["bias"], jnp.float32)[0]
    product = jnp.matmul(hidden.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    return product + bias
