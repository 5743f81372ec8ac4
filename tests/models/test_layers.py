"""Layer parts against values worked by hand and a slow loop."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.attention import attention
from jaxrl.models.layers import rms_norm


def test_rms_norm_by_hand() -> None:
    # mean(x²) = (1 + 49) / 2 = 25, so x / 5 before the scale.
    out = rms_norm(jnp.array([[1.0, -7.0]]), jnp.array([2.0, 10.0]), 0.0)
    np.testing.assert_allclose(out, [[0.4, -14.0]], rtol=1e-6)
    # eps is inside the root: x = 0.1, mean square 0.01, eps 0.03 gives 0.1 / 0.2.
    out = rms_norm(jnp.array([[0.1, -0.1]]), jnp.ones(2), 0.03)
    np.testing.assert_allclose(out, [[0.5, -0.5]], rtol=1e-6)
    assert not rms_norm(jnp.zeros((1, 2)), jnp.ones(2), 1e-6).any()


def test_rms_norm_statistics_are_float32() -> None:
    """MM-10: a bfloat16 sum of 4096 ones sticks at 256 and would give 4."""
    out = rms_norm(jnp.ones((1, 4096), jnp.bfloat16), jnp.ones(4096), 0.0)
    assert out.dtype == jnp.bfloat16
    assert abs(out.astype(jnp.float32) - 1).max() < 1e-2


def test_rms_norm_rounds_once() -> None:
    """In bfloat16 the quotient is worked out in float32 and rounded at the end, nowhere before."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True))
    out = np.asarray(rms_norm(x, jnp.ones(64), 0.0), np.float64)
    assert (abs(out - exact) <= 2.0**-8 * 0.501 * 2 ** np.ceil(np.log2(abs(exact)))).all()


def _slow_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One query, one head at a time, float64."""
    out = np.zeros(q.shape)
    per_group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        scores = [q[b, t, h] @ k[b, s, h // per_group] / math.sqrt(q.shape[3]) for s in seen]
        weights = np.exp(np.array(scores) - max(scores))
        weights /= weights.sum()
        out[b, t, h] = sum(w * v[b, s, h // per_group] for w, s in zip(weights, seen, strict=True))
    return out


def test_attention_equals_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    q = 2 * rng.standard_normal((2, 5, 6, 8)).astype(np.float32)
    k, v = (2 * rng.standard_normal((2, 7, 2, 8)).astype(np.float32) for _ in range(2))
    mask = rng.random((2, 5, 7)) < 0.5
    mask[:, :, 3] = True
    out = attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(mask))
    np.testing.assert_allclose(out, _slow_attention(q, k, v, mask), atol=1e-5)


def test_hidden_keys_weigh_exactly_nothing() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 4, 2, 8)), jnp.float32) for _ in range(3))
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))
    before = attention(q, k, v, mask)
    after = attention(q, k.at[:, 3].set(1e4), v.at[:, 3].set(-1e4), mask)
    assert (before[:, :3] == after[:, :3]).all()
    assert abs(before[:, 3] - after[:, 3]).max() > 1
    grads = jax.grad(lambda k, v: attention(q, k, v, mask)[:, :3].sum(), argnums=(0, 1))(k, v)
    assert not any(grad[:, 3].any() for grad in grads)


def test_a_query_that_sees_nothing_is_finite() -> None:
    q = k = jnp.ones((1, 2, 1, 4))
    v = jnp.arange(8.0).reshape(1, 2, 1, 4)
    mask = jnp.zeros((1, 2, 2), bool)
    np.testing.assert_allclose(attention(q, k, v, mask)[0, 0, 0], [2.0, 3.0, 4.0, 5.0])
    grad = jax.grad(lambda q: attention(q, k, v, mask).sum())(q)
    assert jnp.isfinite(grad).all()


def test_softmax_is_float32_in_bfloat16() -> None:
    """300 equal keys: bfloat16 could not add them up; each weight is 1/300."""
    q = jnp.zeros((1, 1, 1, 2), jnp.bfloat16)
    kv = jnp.ones((1, 300, 1, 2), jnp.bfloat16)
    out = attention(q, kv, kv, jnp.ones((1, 1, 300), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=1e-2)


def test_scores_are_float32_in_bfloat16() -> None:
    """Scores 256/√2 and 257/√2: bfloat16 has no 257. Weight of the second: 1 / (1 + e^(-1/√2))."""
    q = jnp.array([16.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 2)
    k = jnp.array([[16.0, 0.0], [16.0, 1.0]], jnp.bfloat16).reshape(1, 2, 1, 2)
    v = jnp.array([[0.0, 0.0], [1.0, 1.0]], jnp.bfloat16).reshape(1, 2, 1, 2)
    out = attention(q, k, v, jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(out.astype(jnp.float32), 0.6698, atol=4e-3)
