"""Scores and advantages relative to their groups, and the lambda that follows the length."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import adaptive_lambda, gae, group_advantages, whiten, whiten_groups

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN = float("nan")


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 8)).astype(np.float32) * 3 + 1
    return x, rng.random((3, 8)) < 0.7, rng.integers(0, 4, (3, 8)).astype(np.int32)


def test_each_group_is_whitened_alone() -> None:
    x, mask, groups = drawn()
    got = np.asarray(whiten_groups(x, mask, groups, 5))  # the fifth group is empty
    for group in range(4):
        cells = mask & (groups == group)
        expected = (x[cells] - x[cells].mean()) / np.sqrt(x[cells].var() + 1e-8)
        np.testing.assert_allclose(got[cells], expected, atol=1e-5)
    assert (got[~mask] == 0).all()


def test_one_group_is_whiten() -> None:
    x, mask, groups = drawn()
    np.testing.assert_allclose(
        whiten_groups(x, mask, np.zeros_like(groups), 1), whiten(x, mask), atol=1e-6
    )


def test_a_group_without_spread_is_exactly_zero_with_finite_gradients() -> None:
    """GAE-08 within groups: rounding in the mean must not become an advantage."""
    x = jnp.array([0.1, 0.1, 0.1, 7.0, 1.0, 2.0])
    groups, mask = jnp.array([0, 0, 0, 1, 2, 2]), jnp.ones(6, bool)
    got = whiten_groups(x, mask, groups, 3)
    np.testing.assert_array_equal(got[:4], 0.0)
    np.testing.assert_allclose(got[4:], [-1.0, 1.0], atol=1e-6)
    grad = jax.grad(lambda y: jnp.sum(whiten_groups(y, mask, groups, 3) ** 3))(x)
    assert np.isfinite(grad).all()
    assert (np.asarray(whiten_groups(x, jnp.zeros(6, bool), groups, 3)) == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e30])
def test_masked_cells_and_cells_outside_the_groups_are_not_read(bad: float) -> None:
    x, mask, groups = drawn()
    clean = whiten_groups(x, mask, groups, 4)
    np.testing.assert_array_equal(whiten_groups(np.where(mask, x, bad), mask, groups, 4), clean)
    outside = np.where(mask, groups, 9)
    np.testing.assert_array_equal(
        whiten_groups(np.where(mask, x, bad), np.ones_like(mask), outside, 4), clean
    )


def test_lambda_follows_the_length() -> None:
    got = adaptive_lambda([0, 1, 20, 40, 2000], 0.05)
    np.testing.assert_allclose(got, [0.0, 0.0, 0.0, 0.5, 0.99], atol=1e-6)
    with pytest.raises(ValueError, match="alpha=0"):
        adaptive_lambda([1, 2], 0.0)


def test_the_weights_of_gae_sum_to_alpha_times_the_length() -> None:
    """With values 0 and reward 1 a step, the first advantage is nearly 1 / (1 - lambda)."""
    length, alpha = 4000, 0.05
    ones = np.ones((1, length))
    lam = adaptive_lambda(np.full((1, 1), length), alpha)
    first = gae(ones, 0 * ones, ones.astype(bool), lam=lam).advantages[0, 0]
    np.testing.assert_allclose(first, alpha * length, rtol=1e-4)


# --- group advantages ---


def test_each_scale_by_hand() -> None:
    x, g = [1.0, 3.0, 8.0, 2.0, 5.0], [0, 0, 2, 2, 1]
    close(group_advantages(x, g, 3, scale="none"), [-1, 1, 3, -3, 0])
    close(group_advantages(x, g, 3, scale="loo"), [-2, 2, 6, -6, 0])
    close(group_advantages(x, g, 3, eps=1.0), [-0.5, 0.5, 0.75, -0.75, 0])
    # With ddof 1 the deviation of (1, 3) is √2.
    close(group_advantages(x, g, 3, ddof=1, eps=0.0)[:2], [-(0.5**0.5), 0.5**0.5])


@given(
    scores=st.lists(st.integers(-4, 4), min_size=9, max_size=9),
    groups=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    mask=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_groups_agree_with_the_loop(scores: list, groups: list, mask: list) -> None:
    x, g, m = np.array(scores, float) / 3, np.array(groups), np.array(mask)
    for scale in ("std", "none", "loo"):
        expected = np.zeros(9)
        for i in np.flatnonzero(m):
            peers = x[m & (g == g[i])]
            others = x[m & (g == g[i]) & (np.arange(9) != i)]
            if len(set(peers)) == 1:
                continue
            base = others.mean() if scale == "loo" else peers.mean()
            expected[i] = (x[i] - base) / (peers.std() + 1e-6 if scale == "std" else 1.0)
        close(jit_groups(x, g, 4, scale=scale, mask=m), expected)


jit_groups = jax.jit(group_advantages, static_argnames=("num_groups", "scale"))


def test_leave_one_out_is_the_score_minus_the_mean_of_the_others() -> None:
    x = np.array([0.3, 1.7, -2.0, 0.9])
    others = (x.sum() - x) / 3
    close(group_advantages(x, [0] * 4, 1, scale="loo"), x - others)


@pytest.mark.parametrize("scale", ["std", "none", "loo"])
def test_a_group_without_spread_gives_exactly_zero(scale: Any) -> None:
    # 0.1 · 7 / 7 is not 0.1 in float32, and dividing by a small deviation would blow that up.
    a = group_advantages([0.1] * 7 + [5.0], [0] * 7 + [1], 2, scale=scale, eps=0.0)
    np.testing.assert_array_equal(a, np.zeros(8))
    g = jax.grad(lambda x: group_advantages(x, jnp.zeros(3, int), 1, scale=scale).sum())(
        jnp.ones(3)
    )
    assert np.isfinite(g).all()


def test_a_large_offset_costs_no_precision() -> None:
    # The sum of these scores is far beyond float32's whole numbers; the scores are not.
    x = 1e7 + np.arange(100) ** 2 % 97
    close(group_advantages(x, [0] * 100, 1, scale="none"), x - x.mean(), atol=1e-5, rtol=1e-5)


def test_no_more_scores_than_ddof_gives_zero() -> None:
    np.testing.assert_array_equal(group_advantages([1.0, 2.0], [0, 0], 1, ddof=2), [0, 0])


def test_masked_scores_and_ids_are_not_read() -> None:
    x, g = jnp.array([1.0, 3.0, NAN, NAN]), jnp.array([0, 0, 0, -7])
    f = lambda x: group_advantages(x, g, 1, scale="std", mask=jnp.array([1, 1, 0, 0]))  # noqa: E731
    close(f(x), [-1, 1, 0, 0], atol=2e-6)
    grad = jax.grad(lambda x: (f(x) ** 3).sum())(x)
    assert np.isfinite(grad).all() and not grad[2:].any()


def test_nan_stays_visible_in_its_own_group() -> None:
    a = group_advantages([1.0, NAN, 1.0, 3.0, 4.0], [0, 0, 0, 1, 1], 2)
    np.testing.assert_array_equal(np.isnan(a), [True, True, True, False, False])


@pytest.mark.parametrize("wrong", [-1, 2, 99])
def test_ids_out_of_range_are_refused_or_marked_under_jit(wrong: int) -> None:
    x, g = jnp.array([1.0, 3.0, 5.0]), jnp.array([0, 0, wrong])
    with pytest.raises(ValueError, match=rf"group_ids holds {wrong}; expected ids in \[0, 2\)"):
        group_advantages(x, g, 2)
    traced = jax.jit(group_advantages, static_argnames=("num_groups", "scale"))
    a = traced(x, g, num_groups=2, scale="none")
    close(a[:2], [-1, 1])
    assert np.isnan(a[2])


def test_group_integers_empty_and_vmap() -> None:
    a = group_advantages(
        np.array([1, 3], np.int64), np.array([0, 0], np.uint8), np.int64(1), scale="none"
    )
    assert a.dtype == jnp.float32
    close(a, [-1, 1])
    assert group_advantages([], [], 1).shape == (0,)
    batched = jax.vmap(lambda x: group_advantages(x, jnp.array([0, 0]), 1, scale="none"))
    close(batched(jnp.array([[1.0, 3.0], [2.0, 2.0]])), [[-1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (([[1.0]], [[0]], 1), {}, ValueError, r"scores has shape \(1, 1\); expected \[N\]"),
        (([1.0], [0, 0], 1), {}, ValueError, "group_ids has shape"),
        (([1.0], [0.0], 1), {}, TypeError, "group_ids has dtype"),
        (([1.0], [0], 0), {}, ValueError, "num_groups=0"),
        (([1.0], [0], 1.5), {}, TypeError, "num_groups=1.5"),
        (
            ([1.0], [0], 1),
            {"scale": "max"},
            ValueError,
            "scale='max'; expected one of 'std', 'none', 'loo'",
        ),
        (([1.0], [0], 1), {"ddof": -1}, ValueError, "ddof=-1"),
        (([1.0], [0], 1), {"eps": -1.0}, ValueError, "eps=-1.0"),
        (([1.0], [0], 1), {"mask": [1.0]}, TypeError, "mask has dtype"),
    ],
)
def test_group_refusals(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        group_advantages(*args, **options)


def test_a_traced_number_of_groups_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="static_argnames"):
        jax.jit(group_advantages)(jnp.ones(2), jnp.zeros(2, int), 1)
