"""Policy loss, value loss and explained variance, and what all losses accept and refuse."""

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
    explained_variance,
    importance_weights,
    kl_estimate,
    masked_mean,
    ppo_policy_loss,
    ppo_value_loss,
)

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN, INF = float("nan"), float("inf")
KINDS = ("k1", "k2", "k3", "abs")


def rows(*shape: int, seed: int = 0, scale: float = 0.5, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, *shape), scale=scale).astype(np.float32)


# --- policy loss ---


def test_policy_loss_by_hand() -> None:
    # A > 0: the gain stops at r = 1.2. A < 0: the loss keeps growing with r, and stops at 0.8.
    ratio = np.array([1.5, 0.5, 1.5, 0.5])
    loss = ppo_policy_loss(np.log(ratio), np.zeros(4), [1.0, 1, -1, -1])
    close(loss.per_token, [-1.2, -0.5, 1.5, 0.8])
    close(loss.ratio, ratio)
    assert loss.clipped.tolist() == [True, False, False, True]
    assert not loss.dual_clipped.any()


def test_ml_03_only_active_clips_count() -> None:
    clipped = ppo_policy_loss(np.log([1.5, 0.5, 1.5, 0.5]), np.zeros(4), [1.0, 1, -1, -1]).clipped
    close(masked_mean(clipped, np.ones(4, bool)), 0.5)


def test_two_clips_and_the_dual_clip_by_hand() -> None:
    ratio, advantages = np.array([2, 2, 0.5, 0.5]), [2.0, -2, 2, -2]
    loss = ppo_policy_loss(
        np.log(ratio), np.zeros(4), advantages, clip_low=0.1, clip_high=0.3, dual_clip=1.5
    )
    close(loss.per_token, [-2.6, 3.0, -1.0, 1.8])
    assert loss.clipped.tolist() == [True, False, False, True]
    assert loss.dual_clipped.tolist() == [False, True, False, False]


def test_pl_03_at_ratio_one_the_loss_is_minus_a_with_the_gradient_minus_a() -> None:
    logprobs, _, a = rows(3, 4)
    loss = ppo_policy_loss(logprobs, logprobs, a)
    close(loss.per_token, -a)
    assert not loss.clipped.any()
    np.testing.assert_array_equal(loss.ratio, np.ones((3, 4)))
    close(jax.grad(lambda x: ppo_policy_loss(x, logprobs, a).per_token.sum())(logprobs), -a)


def test_the_gradient_is_zero_exactly_where_a_clip_is_active() -> None:
    old, advantages = np.zeros(5, np.float32), np.array([1, 1, -1, -1, -1], np.float32)
    new = np.log([1.5, 0.5, 1.5, 0.5, 9.0]).astype(np.float32)
    g = jax.grad(lambda x: ppo_policy_loss(x, old, advantages, dual_clip=3.0).per_token.sum())(new)
    close(g, [0, -0.5, 1.5, 0, 0])


def test_on_the_edge_of_the_clip_the_gradient_is_whole() -> None:
    # With clip 0 every r = 1 lies on both edges; a tie of max or clip would halve the gradient.
    f = lambda x: ppo_policy_loss(x, jnp.zeros(2), jnp.array([3.0, -3.0]), clip_low=0, clip_high=0)  # noqa: E731
    close(jax.grad(lambda x: f(x).per_token.sum())(jnp.zeros(2)), [-3, 3])
    assert not f(jnp.zeros(2)).clipped.any()


@given(seed=st.integers(0, 999), low=st.floats(0, 0.9), high=st.floats(0, 2), c=st.floats(1.1, 9))
def test_policy_loss_agrees_with_the_formula(seed: int, low: float, high: float, c: float) -> None:
    new, old, a = rows(2, 6, seed=seed, scale=1.5)
    ratio = np.exp(new.astype(float) - old)
    expected = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - low, 1 + high))
    f = jit_policy
    close(f(new, old, a, low, high, None).per_token, expected, rtol=2e-6, atol=2e-6)
    dual = np.where(a < 0, np.minimum(expected, -a * c), expected)
    close(f(new, old, a, low, high, c).per_token, dual, rtol=2e-6, atol=2e-6)


@jax.jit
def jit_policy(new: Any, old: Any, a: Any, low: Any, high: Any, c: Any) -> Any:
    return ppo_policy_loss(new, old, a, clip_low=low, clip_high=high, dual_clip=c)


def test_policy_loss_gradients_are_those_of_the_formula() -> None:
    """-A r and -r where r A is what counts; where the clip counts, 0 and minus the bound."""
    new, old, a = rows(200, seed=4)
    r, A = np.exp(new.astype(float) - old), a.astype(float)  # noqa: N806
    whole = np.where(A >= 0, r <= 1.2, (r >= 0.8) & (r <= 3.0))
    bound = np.where(A >= 0, 1.2, np.where(r < 0.8, 0.8, 3.0))
    total = lambda x, y: ppo_policy_loss(x, old, y, dual_clip=3.0).per_token.sum()  # noqa: E731
    of_new, of_a = jax.grad(total, argnums=(0, 1))(new, a)
    close(of_new, np.where(whole, -A * r, 0.0))
    close(of_a, np.where(whole, -r, -bound))
    assert {(x, y) for x, y in zip(whole, A >= 0, strict=True)} == {
        (x, y) for x in (False, True) for y in (False, True)
    }


@pytest.mark.parametrize("far", [1e3, -1e3, 21.0, -INF])
def test_far_off_tokens_are_finite_and_push_nothing(far: float) -> None:
    f = lambda x: ppo_policy_loss(x, jnp.zeros(2), jnp.array([-1.0, 1.0])).per_token.sum()  # noqa: E731
    value, g = jax.value_and_grad(f)(jnp.array([far, far]))
    assert np.isfinite(value)
    np.testing.assert_array_equal(g, [0, 0])


def test_zero_advantage_gives_zero_loss_at_any_ratio() -> None:
    new = jnp.array([1000.0, -1000.0, INF, -INF])
    loss = ppo_policy_loss(new, jnp.zeros(4), jnp.zeros(4), dual_clip=3.0)
    close(loss.per_token, 0)
    assert (
        not loss.clipped.any() and np.isfinite(kl_estimate(new[:2], jnp.zeros(2), kind="k3")).all()
    )


def test_pl_06_poison_at_masked_positions_changes_no_output_and_no_gradient() -> None:
    new, old, a = rows(3, 5)
    m = np.random.default_rng(1).random((3, 5)) < 0.6

    def f(*args: Any) -> Any:
        loss = ppo_policy_loss(*args, dual_clip=3.0, mask=m)
        return (loss.per_token + loss.ratio).sum(), loss

    run = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))
    clean = run(new, old, a)
    for poison in (NAN, INF, -INF, 1e30, 7.0):
        dirty = run(*(np.where(m, x, poison) for x in (new, old, a)))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    for x in (*clean[0][1], *clean[1]):
        assert not np.any(np.asarray(x)[~m])


def test_policy_loss_keeps_a_valid_nan_visible() -> None:
    z, bad = jnp.zeros(2), jnp.array([NAN, 0.0])
    for args in ((bad, z, z + 1), (z, bad, z + 1), (z, z, bad)):
        np.testing.assert_array_equal(np.isnan(ppo_policy_loss(*args).per_token), [True, False])


# --- value loss ---


def test_vl_01_the_larger_of_the_two_errors_counts() -> None:
    loss = ppo_value_loss([1.0], [0.0], [1.0], clip=0.2)
    close(loss.per_token, [0.32])
    assert loss.clipped.tolist() == [True]


def test_vl_02_the_clip_is_around_the_stored_value() -> None:
    close(ppo_value_loss([0.9], [0.0], [1.0], clip=0.2).per_token, [0.32])
    close(ppo_value_loss(0.9, 0.0, 1.0, clip=0.2).per_token, 0.32)


def test_value_loss_without_clip_is_half_the_squared_error() -> None:
    loss = ppo_value_loss([3.0, 1.0], [0.0, 0.0], [1.0, 1.0], clip=None)
    close(loss.per_token, [2.0, 0.0])
    assert not loss.clipped.any()


@given(seed=st.integers(0, 999), clip=st.floats(0, 2))
def test_value_loss_agrees_with_the_formula(seed: int, clip: float) -> None:
    v, old, r = rows(2, 6, seed=seed, scale=1.5)
    near = old + np.clip(v.astype(float) - old, -clip, clip)
    expected = 0.5 * np.maximum((v - r) ** 2, (near - r) ** 2)
    close(jit_value(v, old, r, clip).per_token, expected, rtol=1e-5, atol=2e-6)


jit_value = jax.jit(lambda v, old, r, clip: ppo_value_loss(v, old, r, clip=clip))


def test_inside_the_clip_rounding_does_not_count_as_clipped() -> None:
    v, old, r = rows(1000, scale=10.0)
    old = v + np.float32(0.01) * old
    assert not ppo_value_loss(v, old, r, clip=0.5).clipped.any()


def test_value_gradients_are_the_error_of_what_counts() -> None:
    """The value's own error, or that of the clipped value, which moves with the stored one."""
    v, old, r = rows(4, 5, scale=1.0)
    total = lambda *xs: ppo_value_loss(*xs, clip=0.3).per_token.sum()  # noqa: E731
    of_v, of_old, of_r = jax.grad(total, argnums=(0, 1, 2))(v, old, r)
    own, bound = v.astype(float) - r, old + np.clip(v.astype(float) - old, -0.3, 0.3) - r
    clipped = bound**2 > own**2
    close(of_v, np.where(clipped, 0, own))
    close(of_old, np.where(clipped, bound, 0))
    close(of_r, -np.where(clipped, bound, own))
    np.testing.assert_array_equal(ppo_value_loss(v, old, r, clip=0.3).clipped, clipped)
    assert clipped.any() and not clipped.all()


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_reads_nothing_at_masked_positions(clip: Any) -> None:
    v, old, r = rows(3, 5)
    m = np.random.default_rng(1).random((3, 5)) < 0.6
    f = lambda *xs: ppo_value_loss(*xs, clip=clip, mask=m).per_token.sum()  # noqa: E731
    run = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))
    clean = run(v, old, r)
    for poison in (NAN, INF, 1e30):
        jax.tree.map(
            np.testing.assert_array_equal,
            run(*(np.where(m, x, poison) for x in (v, old, r))),
            clean,
        )
    for g in clean[1]:
        assert not np.any(np.asarray(g)[~m])


def test_value_loss_keeps_a_valid_nan_visible() -> None:
    z, bad = jnp.zeros(2), jnp.array([NAN, 0.0])
    for args in ((bad, z, z), (z, bad, z), (z, z, bad)):
        np.testing.assert_array_equal(np.isnan(ppo_value_loss(*args).per_token), [True, False])


# --- explained variance ---


def test_explained_variance_by_hand() -> None:
    r = np.array([[0.0, 2.0, 9.0]])
    m = np.array([[1, 1, 0]])
    close(explained_variance([[0.0, 1.0, NAN]], r, m), 0.75)
    close(explained_variance(r, r, m), 1.0)
    close(explained_variance(np.full((1, 3), 7.0), r, m), 0.0)
    close(explained_variance(-r, r, m), -3.0)
    close(explained_variance(r + 5, r, m), 1.0)  # a constant offset is not variance


@pytest.mark.parametrize("offset", [0.0, 1000.1])
def test_returns_without_variance_explain_nothing(offset: float) -> None:
    v, r = rows(50, count=2)
    r = np.full(50, offset, np.float32)
    for m in (np.ones(50, bool), np.zeros(50, bool)):
        value, g = jax.value_and_grad(explained_variance)(v, r, m)
        assert value == 0 and np.isfinite(g).all()


def test_explained_variance_agrees_with_numpy_on_large_offsets() -> None:
    v, r, _ = rows(4, 50)
    m = np.random.default_rng(2).random((4, 50)) < 0.5
    v, r = v + 100, r + 100
    error = (r - v).astype(float)[m]
    close(explained_variance(v, r, m), 1 - error.var() / r.astype(float)[m].var(), rtol=2e-5)
    assert np.isnan(explained_variance(np.where(v == v[m][0], NAN, v), r, m))


# --- what they accept and refuse ---

LOSSES = (ppo_policy_loss, ppo_value_loss)
T3 = np.zeros(3)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, jnp.bfloat16, np.float64])
def test_results_are_float32_for_any_input(dtype: Any) -> None:
    x, m = np.array([0, 1, 2], dtype), np.array([1, 1, 0], np.int8)
    outputs = [f(x, x, x, mask=m)[0] for f in LOSSES]
    outputs += [kl_estimate(x, x, kind=k, mask=m) for k in KINDS]
    outputs += [
        importance_weights(x, x, m),
        explained_variance(x, x, m),
        ppo_policy_loss(x, x, x).ratio,
    ]
    assert all(y.dtype == jnp.float32 for y in outputs)
    assert ppo_policy_loss(x, x, x).clipped.dtype == ppo_value_loss(x, x, x).clipped.dtype == bool


def test_empty_arrays_and_many_axes() -> None:
    for shape in ((0,), (2, 0), (2, 1, 3, 4)):
        x, m = np.zeros(shape), np.ones(shape, bool)
        assert ppo_policy_loss(x, x, x, mask=m).ratio.shape == shape
        assert ppo_value_loss(x, x, x, mask=m).per_token.shape == shape
        assert kl_estimate(x, x, kind="k3", mask=m).shape == shape
        assert (
            importance_weights(x, x, m, level="sequence", segment_ids=x.astype(int)).shape == shape
        )
        assert explained_variance(x, x, m) == 0


def test_vmap_is_the_same_function() -> None:
    new, old, a = rows(2, 4)
    m = np.array([[1, 0, 1, 1], [0, 0, 1, 1]], bool)
    plain = ppo_policy_loss(new, old, a, mask=m)
    mapped = jax.vmap(lambda *xs: ppo_policy_loss(*xs[:3], mask=xs[3]))(new, old, a, m)
    jax.tree.map(close, mapped, plain)
    f = partial(importance_weights, level="sequence")
    close(jax.vmap(f)(new, old, m), f(new, old, m))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ppo_policy_loss(T3, T3[:2], T3),
            ValueError,
            r"old_logprobs has shape \(2,\); expected \(3,\)",
        ),
        (
            lambda: ppo_policy_loss(T3, T3, 0.0),
            ValueError,
            r"advantages has shape \(\); expected \(3,\)",
        ),
        (
            lambda: ppo_policy_loss(T3, T3, T3, mask=np.ones((1, 3), bool)),
            ValueError,
            "mask has shape",
        ),
        (lambda: ppo_policy_loss(T3, T3, T3, mask=T3), TypeError, "mask has dtype"),
        (
            lambda: ppo_policy_loss(T3, T3, T3, clip_low=-0.1),
            ValueError,
            "clip_low=-0.1; expected a number >= 0",
        ),
        (lambda: ppo_policy_loss(T3, T3, T3, clip_high=-0.1), ValueError, "clip_high=-0.1"),
        (lambda: ppo_policy_loss(T3, T3, T3, clip_high=NAN), ValueError, "clip_high=nan"),
        (
            lambda: ppo_policy_loss(T3, T3, T3, clip_low=T3),
            ValueError,
            r"clip_low has shape \(3,\)",
        ),
        (
            lambda: ppo_policy_loss(T3, T3, T3, dual_clip=1.0),
            ValueError,
            "dual_clip=1.0; expected a number > 1",
        ),
        (lambda: ppo_value_loss(T3, T3, T3[:1]), ValueError, r"returns has shape \(1,\)"),
        (lambda: ppo_value_loss(T3, T3, T3, clip=-1), ValueError, "clip=-1"),
        (lambda: kl_estimate(T3, T3[:1]), ValueError, "ref_logprobs has shape"),
        (
            lambda: kl_estimate(T3, T3, kind="k4"),
            ValueError,
            "kind='k4'; expected one of 'k1', 'k2', 'k3', 'abs'",
        ),
        (
            lambda: importance_weights(T3, T3, T3 == 0, level="row"),
            ValueError,
            "expected one of 'token', 'sequence'",
        ),
        (
            lambda: importance_weights(T3, T3, T3 == 0, cap=0),
            ValueError,
            "cap=0; expected a number > 0",
        ),
        (lambda: importance_weights(T3, T3, None), TypeError, "mask is None"),
        (lambda: importance_weights(0.0, 0.0, True), ValueError, "time last"),
        (lambda: explained_variance(T3, T3[:2], T3 == 0), ValueError, "returns has shape"),
        (lambda: explained_variance(T3, T3, T3), TypeError, "mask has dtype"),
    ],
)
def test_refusals_name_the_argument(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
