"""GAE against arithmetic by hand, a plain loop, and itself laid out otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import gae

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN = float("nan")


def gae_loop(
    r: Any, v: Any, m: Any, gamma: Any = 1.0, lam: Any = 0.95, bootstrap: Any = 0.0, ids: Any = None
) -> tuple:
    """The definition in float64: per row, per run of ids, over the list of its steps."""
    r, v = np.asarray(r, float), np.asarray(v, float)
    gamma, lam, bootstrap = (
        np.broadcast_to(np.asarray(x, float), v.shape) for x in (gamma, lam, bootstrap)
    )
    ids = np.zeros(v.shape, int) if ids is None else np.asarray(ids)
    out = np.zeros(v.shape)
    for row in np.ndindex(v.shape[:-1]):
        start = 0
        for stop in range(1, v.shape[-1] + 1):
            if stop < v.shape[-1] and ids[row][stop] == ids[row][stop - 1]:
                continue
            steps = [t for t in range(start, stop) if np.asarray(m)[row][t]]
            start, a, after = stop, 0.0, None
            for t in reversed(steps):
                after = bootstrap[row][t] if after is None else after
                a = r[row][t] + gamma[row][t] * after - v[row][t] + gamma[row][t] * lam[row][t] * a
                out[row][t], after = a, v[row][t]
    return out, np.where(m, out + np.where(m, v, 0), 0)


def agrees(got: Any, expected: Any) -> None:
    """To 1e-6 of the largest value: float32 keeps no more of a sum than of its terms."""
    for a, b in zip(got, expected, strict=True):
        close(a, b, atol=1e-6 * max(1.0, np.abs(b).max(initial=0.0)))


# --- by hand ---


def test_two_steps_by_hand() -> None:
    # δ1 = 1 − 0.5 = 0.5; δ0 = 0 + 0.9 · 0.5 − 0.2 = 0.25; A0 = 0.25 + 0.9 · 0.5 · 0.5 = 0.475
    a, returns = gae([0.0, 1.0], [0.2, 0.5], [1, 1], gamma=0.9, lam=0.5)
    close(a, [0.475, 0.5])
    close(returns, [0.675, 1.0])


def test_gae_01_tool_output_is_not_a_step() -> None:
    mask = jnp.array([True, False, False, True])
    a, returns = gae([0.0, 0, 0, 1], [0.5, 9, 9, 0.2], mask, gamma=0.9, lam=0.5)
    close(a, [0.04, 0, 0, 0.8])
    close(returns, [0.54, 0, 0, 1.0])


@pytest.mark.parametrize("tail", [5.0, -1e30, NAN, float("inf")])
def test_gae_04_the_padded_tail_does_not_leak(tail: float) -> None:
    a, returns = gae([0, 1, tail, tail], [0.1, 0.2, tail, tail], [1, 1, 0, 0], gamma=1.0, lam=0.95)
    close(a, [0.86, 0.8, 0, 0])
    close(returns, [0.96, 1.0, 0, 0])


def test_gae_11_nothing_crosses_from_one_packed_response_to_another() -> None:
    a, _ = gae([0.0, 1, 0, 5], jnp.zeros(4), [1] * 4, gamma=1, lam=1, segment_ids=[1, 1, 2, 2])
    close(a, [1, 1, 5, 5])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.3, 0.0), (0.99, 1.0)])
def test_gae_13_a_response_of_one_token(gamma: float, lam: float) -> None:
    a, returns = gae([1.0], [0.3], [1], gamma=gamma, lam=lam)
    close(a, [0.7])
    close(returns, [1.0])


def test_an_id_that_comes_back_is_another_segment() -> None:
    a, _ = gae([0.0, 1, 0, 2, 0, 4], jnp.zeros(6), [1] * 6, lam=1.0, segment_ids=[7, 7, 3, 3, 7, 7])
    close(a, [1, 1, 2, 2, 4, 4])


def test_masked_padding_between_runs_of_one_id_separates_them() -> None:
    a, _ = gae([1.0, 0, 2], jnp.zeros(3), [1, 0, 1], lam=1.0, segment_ids=[1, 0, 1])
    close(a, [1, 0, 2])


def test_bootstrap_is_the_value_after_the_last_step() -> None:
    # Row 0 was cut off after its second token (V = 10 afterwards), row 1 ended.
    rewards, values = jnp.zeros((2, 3)), jnp.ones((2, 3))
    mask = jnp.array([[True, True, False], [True, True, True]])
    a, returns = gae(
        rewards, values, mask, gamma=0.5, lam=1.0, bootstrap=jnp.array([[10.0], [0.0]])
    )
    # Row 0: δ1 = 5 − 1 = 4, δ0 = 0.5 − 1 = −0.5, A0 = −0.5 + 0.5 · 4 = 1.5
    close(a[0], [1.5, 4.0, 0.0])
    close(returns[0], [2.5, 5.0, 0.0])
    # Row 1: with λ = 1 it is the discounted return, 0, minus the value.
    close(a[1], [-1.0, -1.0, -1.0])


def test_bootstrap_along_time_is_read_at_the_last_step_of_each_segment_only() -> None:
    bootstrap = jnp.array([[NAN, 3.0, NAN, NAN, 7.0, NAN]])
    mask = jnp.array([[True, True, False, True, True, False]])
    ids = jnp.array([[1, 1, 1, 2, 2, 2]])
    f = partial(gae, mask=mask, gamma=1.0, lam=1.0, segment_ids=ids)
    a, _ = f(jnp.zeros((1, 6)), jnp.zeros((1, 6)), bootstrap=bootstrap)
    close(a, [[3, 3, 0, 7, 7, 0]])
    loss = lambda r, v, b: f(r, v, bootstrap=b).advantages.sum()  # noqa: E731
    for g in jax.grad(loss, argnums=(0, 1, 2))(jnp.zeros((1, 6)), jnp.zeros((1, 6)), bootstrap):
        assert np.isfinite(g).all()
    close(
        jax.grad(loss, argnums=2)(jnp.zeros((1, 6)), jnp.zeros((1, 6)), bootstrap),
        [[0, 2, 0, 0, 2, 0]],
    )


def test_a_number_as_bootstrap_reaches_every_row() -> None:
    close(
        gae(
            jnp.zeros((2, 2)), jnp.zeros((2, 2)), jnp.ones((2, 2), bool), lam=1.0, bootstrap=2
        ).advantages,
        2,
    )


# --- against the loop ---

jitted = jax.jit(gae)
cells = st.lists(st.booleans(), min_size=18, max_size=18)


@given(
    mask=cells, ids=st.lists(st.integers(0, 2), min_size=18, max_size=18), seed=st.integers(0, 99)
)
def test_any_mask_and_any_segments_agree_with_the_loop(mask: list, ids: list, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, s = np.array(mask).reshape(2, 9), np.array(ids).reshape(2, 9)
    r, v, boot = rng.normal(size=(3, 2, 9))
    gamma, lam = rng.uniform(size=(2, 2, 9))
    got = jitted(r, v, m, gamma=gamma, lam=lam, bootstrap=boot, segment_ids=s)
    agrees(got, gae_loop(r, v, m, gamma, lam, boot, s))


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 256, 300])
def test_every_cut_into_blocks_agrees_with_the_loop(length: int) -> None:
    rng = np.random.default_rng(length)
    r, v = rng.normal(size=(2, 2, length)).astype(np.float32)
    m = rng.random((2, length)) < 0.7
    boot = rng.normal(size=(2, 1))
    # With one segment a row every block depends on all later ones; with a few, on some.
    for ids in (np.zeros((2, length), int), np.cumsum(rng.random((2, length)) < 0.01, axis=-1)):
        expected = gae_loop(r, v, m, 0.99, 0.9, boot, ids)
        got = gae(r, v, m, gamma=0.99, lam=0.9, bootstrap=boot, segment_ids=ids)
        agrees(got, expected)


def test_gamma_and_lam_may_vary_by_row_or_by_position() -> None:
    rng = np.random.default_rng(3)
    r, v, g = rng.uniform(size=(3, 2, 5))
    m = np.ones((2, 5), bool)
    for gamma in (0.9, np.float32(0.9), jnp.array(0.9), g[:, :1], g[:1], g[:1, :1], g):
        agrees(gae(r, v, m, gamma=gamma, lam=0.5), gae_loop(r, v, m, gamma, 0.5))
        agrees(gae(r, v, m, gamma=0.5, lam=gamma), gae_loop(r, v, m, 0.5, gamma))
    agrees(
        gae(r[0], v[0], m[0], gamma=g[0], lam=g[0, :1]), gae_loop(r[0], v[0], m[0], g[0], g[0, :1])
    )


# --- identities ---


def random_rows(shape: tuple[int, ...] = (3, 8), seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    r, v = rng.normal(size=(2, *shape)).astype(np.float32)
    return r, v, rng.random(shape) < 0.7


def test_lambda_one_is_the_discounted_return_minus_the_value() -> None:
    r, v, _ = random_rows()
    discounted = sum(0.9**k * np.pad(r, ((0, 0), (0, k)))[:, k:] for k in range(8))
    a, returns = gae(r, v, np.ones(r.shape, bool), gamma=0.9, lam=1.0)
    close(a, discounted - v, atol=2e-6)
    close(returns, discounted, atol=2e-6)


def test_lambda_zero_is_the_td_error() -> None:
    r, v, _ = random_rows()
    a, _ = gae(r, v, np.ones(r.shape, bool), gamma=0.9, lam=0.0)
    close(a, r + 0.9 * np.pad(v, ((0, 0), (0, 1)))[:, 1:] - v)


def test_dropping_the_masked_positions_changes_nothing() -> None:
    r, v, m = random_rows((1, 12))
    whole = gae(r, v, m, gamma=0.9, lam=0.8)
    alone = gae(r[m], v[m], np.ones(m.sum(), bool), gamma=0.9, lam=0.8)
    agrees([x[0][m[0]] for x in whole], alone)


def test_packed_segments_equal_each_alone() -> None:
    r, v, m = random_rows((9,))
    packed = gae(r, v, m, segment_ids=[4] * 4 + [2] * 5).advantages
    close(
        packed,
        jnp.concatenate(
            [
                gae(x[0], x[1], x[2]).advantages
                for x in ((r[:4], v[:4], m[:4]), (r[4:], v[4:], m[4:]))
            ]
        ),
    )


def test_leading_axes_vmap_and_jit_are_the_same_function() -> None:
    r, v, m = random_rows((2, 3, 5))
    plain = gae(r, v, m)
    agrees(jax.vmap(gae)(r, v, m), plain)
    agrees(jitted(r, v, m), plain)
    agrees(gae(r[1, 2], v[1, 2], m[1, 2]), [x[1, 2] for x in plain])


# --- gradients and poison ---


@pytest.mark.parametrize("poison", [NAN, float("inf"), -1e30])
def test_masked_positions_reach_no_output_and_no_gradient(poison: float) -> None:
    r, v, m = random_rows((3, 6))
    m[1] = False
    boot, gamma, lam = (np.full((3, 6), x, np.float32) for x in (0.3, 0.9, 0.8))

    def total(r: Any, v: Any, gamma: Any, lam: Any, boot: Any) -> Any:
        a, returns = gae(r, v, m, gamma=gamma, lam=lam, bootstrap=boot)
        return (a**2 + returns).sum(), (a, returns)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4), has_aux=True))
    clean = run(r, v, gamma, lam, boot)
    dirty = run(*(np.where(m, x, poison) for x in (r, v, gamma, lam, boot)))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    for x in (*clean[0][1], *clean[1]):
        assert np.all(np.asarray(x)[~m] == 0.0)


def test_a_row_without_steps_does_not_read_its_bootstrap() -> None:
    def total(gamma: jax.Array, boot: jax.Array) -> jax.Array:
        m = jnp.array([[True, True], [False, False]])
        return gae(
            jnp.ones((2, 2)), jnp.ones((2, 2)), m, gamma=gamma, bootstrap=boot
        ).advantages.sum()

    for g in jax.grad(total, argnums=(0, 1))(jnp.float32(0.9), jnp.array([[1.0], [NAN]])):
        assert np.isfinite(g).all()


def test_nan_at_a_step_stays_visible_and_stays_in_its_segment() -> None:
    a, _ = gae([0.0, NAN, 0, 0], jnp.zeros(4), [1] * 4, segment_ids=[1, 1, 2, 2])
    np.testing.assert_array_equal(np.isnan(a), [True, True, False, False])


def test_gradients_are_those_of_finite_differences() -> None:
    """Central differences of the loop, which is float64."""
    given = [np.asarray(x, float) for x in (*random_rows((2, 5))[:2], 0.9, np.ones((2, 1)))]
    m = random_rows((2, 5))[2]
    weights = np.random.default_rng(1).normal(size=(2, 2, 5))

    def total(gae_of: Any, r: Any, v: Any, gamma: Any, boot: Any) -> Any:
        both = gae_of(r, v, m, gamma=gamma, lam=0.8, bootstrap=boot)
        return sum((w * x).sum() for w, x in zip(weights, both, strict=True))

    grads = jax.grad(partial(total, gae), argnums=(0, 1, 2, 3))(*map(jnp.float32, given))
    for number, (x, grad) in enumerate(zip(given, grads, strict=True)):
        for at in np.ndindex(x.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [np.array(y) for y in given]
                moved[number][at] += step
                ends.append(
                    total(
                        lambda *a, gamma, lam, bootstrap: gae_loop(*a, gamma, lam, bootstrap),
                        *moved,
                    )
                )
            close(grad[at], (ends[0] - ends[1]) / 2e-5)


def test_gradient_flows_through_values_and_long_rows() -> None:
    # Σ A with λ = 0, γ = 1 is Σ r − V(s₀): every later value cancels.
    v = jnp.zeros((1, 300))
    g = jax.grad(lambda v: gae(v, v, jnp.ones(v.shape, bool), gamma=1.0, lam=0.0).advantages.sum())(
        v
    )
    close(g, jnp.ones_like(v).at[0, 0].set(0.0))


# --- what it accepts and refuses ---


@pytest.mark.parametrize("dtype", [np.int32, np.float16, jnp.bfloat16, np.float64, np.int8])
def test_results_are_float32_for_any_input(dtype: Any) -> None:
    r, v = np.array([0, 3], dtype), np.array([1, 2], dtype)
    a, returns = gae(r, v, np.array([1, 1], np.uint8), gamma=np.array(1, dtype), lam=1)
    assert a.dtype == returns.dtype == jnp.float32
    close(a, [2, 1])


def test_empty_and_fully_masked() -> None:
    for shape in ((0,), (2, 0), (0, 3)):
        assert gae(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)).returns.shape == shape
    a, returns = gae(
        np.zeros((2, 0)),
        np.zeros((2, 0)),
        np.zeros((2, 0), bool),
        bootstrap=np.ones((2, 1)),
        segment_ids=np.zeros((2, 0), int),
    )
    assert a.shape == (2, 0)
    assert not np.any(gae(np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 3), int)))


B2 = np.zeros((2, 3))
ONES = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((B2[:, :2], B2, ONES), {}, ValueError, r"rewards has shape \(2, 2\); expected \(2, 3\)"),
        ((B2, B2, ONES[:1]), {}, ValueError, r"mask has shape \(1, 3\); expected \(2, 3\)"),
        ((B2, B2, ONES.astype(float)), {}, TypeError, "mask has dtype float64"),
        ((B2, B2, ONES * 2), {}, ValueError, "mask holds 2"),
        ((B2, B2, None), {}, TypeError, "mask is None"),
        ((B2, 0.0, ONES), {}, ValueError, r"values has shape \(\)"),
        ((B2, B2, ONES), {"bootstrap": np.ones(2)}, ValueError, r"bootstrap has shape \(2,\)"),
        ((B2, B2, ONES), {"gamma": np.ones(3)}, ValueError, r"gamma has shape \(3,\)"),
        ((B2, B2, ONES), {"lam": np.ones((2, 2))}, ValueError, r"lam has shape \(2, 2\)"),
        (
            (B2, B2, ONES),
            {"segment_ids": B2[0].astype(int)},
            ValueError,
            r"segment_ids has shape \(3,\)",
        ),
        ((B2, B2, ONES), {"segment_ids": B2}, TypeError, "segment_ids has dtype float64"),
    ],
)
def test_refusals_name_the_argument(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        gae(*args, **options)
