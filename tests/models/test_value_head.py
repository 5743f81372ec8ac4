"""The critic's head: zero to begin with, float32 always."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import value_head_apply, value_head_init


def test_first_values_are_exactly_zero() -> None:
    head = value_head_init(16)
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), head) == {
        "kernel": ((16, 1), "float32"),
        "bias": ((1,), "float32"),
    }
    values = value_head_apply(head, 1e3 * jnp.ones((2, 5, 16)))
    assert values.shape == (2, 5) and (values == 0).all()
    # Zero, not stuck: the kernel's gradient is the hidden state.
    grad = jax.grad(lambda head: value_head_apply(head, jnp.full((16,), 3.0)))(head)
    np.testing.assert_array_equal(grad["kernel"], np.full((16, 1), 3.0))
    np.testing.assert_array_equal(grad["bias"], [1.0])


def test_value_by_hand_and_in_float32() -> None:
    head = {"kernel": jnp.array([[1.0], [1 / 1024]]), "bias": jnp.array([0.5])}
    values = value_head_apply(head, jnp.array([[1.0, 1.0]], jnp.bfloat16))
    assert values.dtype == jnp.float32
    # 1 + 1/1024 + 0.5 has eleven bits after the point: bfloat16 would drop the middle term.
    np.testing.assert_array_equal(values, [1.5009765625])
