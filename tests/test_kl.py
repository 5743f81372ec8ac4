"""KL estimators: their values, whose gradient is the KL's, masked positions, far-off tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import (
    kl_estimate,
)

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN, INF = float("nan"), float("inf")
KINDS = ("k1", "k2", "k3", "abs")


def two(*shape: int, seed: int = 0, scale: float = 0.5) -> np.ndarray:
    """Log-probabilities of the policy and of the reference."""
    noise = np.random.default_rng(seed).normal(size=(2, *shape), scale=scale)
    return noise.astype(np.float32)


def test_kl_estimators_by_hand() -> None:
    # d = ln 2 and −ln 2: k3 = e^−d − 1 + d
    new, ref = np.log([0.5, 0.25]), np.log([0.25, 0.5])
    d = np.log(2.0)
    close(kl_estimate(new, ref), [d, -d])
    close(kl_estimate(new, ref, kind="k2"), [d * d / 2] * 2)
    close(kl_estimate(new, ref, kind="abs"), [d, d])
    close(kl_estimate(new, ref, kind="k3"), [0.5 - 1 + d, 2 - 1 - d])


def test_kl_02_which_estimator_has_the_gradient_of_the_kl() -> None:
    # Policy softmax([a, 0]) = (0.8, 0.2), reference (0.5, 0.5), the expectation in full.
    a, ref = np.log(4.0), np.log(0.5)
    p = np.array([0.8, 0.2])

    def gradient(kind: Any) -> float:
        def token(a: jax.Array) -> jax.Array:
            new = jax.nn.log_softmax(jnp.array([a, 0.0]))
            return kl_estimate(new, jnp.full(2, ref), kind=kind)

        return float(p @ jax.jacobian(token)(a))

    value = lambda kind: float(p @ kl_estimate(np.log(p), np.full(2, ref), kind=kind))  # noqa: E731
    close(value("k1"), 0.192745)
    close(value("k3"), 0.192745)
    close(gradient("k2"), 0.221807)
    close(gradient("k1"), 0.0)
    close(gradient("k3"), 0.3)


def test_kl_01_descending_k2_brings_the_policy_to_the_reference() -> None:
    ref = jnp.array([0.2, 0.5, 0.3])

    def kl(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(ref)))

    def sampled(x: jax.Array) -> jax.Array:
        p = jax.lax.stop_gradient(jax.nn.softmax(x))
        return jnp.sum(p * kl_estimate(jax.nn.log_softmax(x), jnp.log(ref), kind="k2"))

    x = jnp.array([2.0, -1.0, 0.5])
    close(jax.grad(sampled)(x), jax.grad(kl)(x))
    for _ in range(5):
        before, x = kl(x), x - 0.1 * jax.grad(sampled)(x)
        assert kl(x) < before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad", [NAN, -1e10, INF, -INF])
def test_kl_04_masked_sentinels_reach_neither_value_nor_gradient(kind: Any, pad: float) -> None:
    f = lambda new, ref: kl_estimate(new, ref, kind=kind, mask=jnp.array([1, 0])).sum()  # noqa: E731
    new = ref = jnp.array([-1.0, pad])
    value, grads = jax.value_and_grad(f, argnums=(0, 1))(new, ref)
    assert value == 0
    for g in grads:
        assert np.isfinite(g[0]) and g[1] == 0


@given(seed=st.integers(0, 999))
def test_kl_estimators_agree_with_the_formulas(seed: int) -> None:
    new, ref = two(2, 6, seed=seed, scale=2)
    d = new.astype(float) - ref
    expected = {"k1": d, "k2": d * d / 2, "abs": abs(d), "k3": np.exp(-d) - 1 + d}
    for kind in KINDS:
        close(jit_kl(new, ref, kind=kind), expected[kind], rtol=3e-6, atol=2e-6)


jit_kl = jax.jit(kl_estimate, static_argnames="kind")


def test_k3_is_precise_near_zero_and_bounded_far_out() -> None:
    close(kl_estimate([1e-3], [0.0], kind="k3"), [4.998334e-07], rtol=1e-3, atol=0)
    far = kl_estimate([-100.0, 100.0], [0.0, 0.0], kind="k3")
    close(far, [np.exp(20.0) - 1 - 100, np.exp(-20.0) - 1 + 100], rtol=1e-6)
    g = jax.grad(lambda x: kl_estimate(x, jnp.zeros(2), kind="k3").sum())(
        jnp.array([-100.0, 100.0])
    )
    close(g, [1, 1])


def test_k1_is_not_clamped() -> None:
    close(kl_estimate([100.0], [0.0]), [100.0])
    close(kl_estimate([100.0], [0.0], kind="k2"), [5000.0])
    close(kl_estimate([-100.0], [0.0], kind="abs"), [100.0])


def test_kl_gradients_are_those_of_the_formulas() -> None:
    """Each with the other sign for the reference."""
    new, ref = two(3, 5)
    d = new.astype(float) - ref
    expected = {"k1": np.ones_like(d), "k2": d, "k3": 1 - np.exp(-d), "abs": np.sign(d)}
    for kind in KINDS:
        total = lambda new, ref, kind=kind: kl_estimate(new, ref, kind=kind).sum()  # noqa: E731
        of_new, of_ref = jax.grad(total, argnums=(0, 1))(new, ref)
        close(of_new, expected[kind])
        close(of_ref, -expected[kind])
