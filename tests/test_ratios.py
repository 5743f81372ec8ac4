"""Importance weights, sequence ratios, rejection: by hand, by loops, under garbage."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import aggregate, importance_weights, ppo_policy_loss, sequence_log_ratio, within_bounds

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN, INF = float("nan"), float("inf")
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, *shape), scale=0.5).astype(np.float32)


def drawn(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Rows of up to three segments with masked tokens in between."""
    rng = np.random.default_rng(seed)
    new, old = (-rng.random((4, 12)).astype(np.float32) for _ in range(2))
    mask = rng.random((4, 12)) < 0.7
    segments = np.sort(rng.integers(0, 3, (4, 12)), axis=1).astype(np.int32)
    return new, old, mask, segments


def by_loop(d: np.ndarray, mask: np.ndarray, segments: np.ndarray, mean: bool) -> np.ndarray:
    out = np.zeros(d.shape)
    for row in range(len(d)):
        for segment in set(segments[row].tolist()):
            cells = mask[row] & (segments[row] == segment)
            if cells.any():
                out[row][cells] = d[row][cells].mean() if mean else d[row][cells].sum()
    return out


def test_sequence_log_ratio_is_the_mean_over_each_segment() -> None:
    new, old, mask, segments = drawn()
    got = sequence_log_ratio(new, old, mask, segment_ids=segments)
    np.testing.assert_allclose(got, by_loop(new - old, mask, segments, mean=True), atol=1e-6)
    whole = sequence_log_ratio(new, old, mask)
    np.testing.assert_allclose(
        whole, by_loop(new - old, mask, np.zeros_like(segments), mean=True), atol=1e-6
    )


@pytest.mark.parametrize("bad", GARBAGE)
def test_masked_cells_change_neither_ratio_nor_gradient(bad: float) -> None:
    new, old, mask, segments = drawn()

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(sequence_log_ratio(x, dirty_old, mask, segment_ids=segments) ** 2)

    clean = sequence_log_ratio(new, old, mask, segment_ids=segments)
    dirty, dirty_old = np.where(mask, new, bad), np.where(mask, old, bad)
    np.testing.assert_array_equal(
        sequence_log_ratio(dirty, dirty_old, mask, segment_ids=segments), clean
    )
    grad = np.asarray(jax.grad(total)(dirty))
    assert (grad[~mask] == 0).all() and np.isfinite(grad).all() and (grad[mask] != 0).any()
    for level in ("token", "sequence", "geometric"):
        kept, dirty_kept = (
            within_bounds(a, b, mask, low=0.8, high=1.3, level=level, segment_ids=segments)
            for a, b in ((new, old), (dirty, dirty_old))
        )
        np.testing.assert_array_equal(kept, dirty_kept)
        assert not np.asarray(kept)[~mask].any()


def test_gspo_loss_and_gradient_by_hand() -> None:
    """Zheng et al. 2025, equations 5 and 7: s = exp(mean d); each token gets -A s / n."""
    new, old = np.array([[-1.0, -2.0, -0.5]]), np.array([[-1.2, -2.1, -0.5]])
    mask, advantage = np.ones((1, 3), bool), 2.0

    def loss(x: jax.Array) -> jax.Array:
        d = sequence_log_ratio(x, old, mask)
        per_token = ppo_policy_loss(
            d, jnp.zeros((1, 3)), jnp.full((1, 3), advantage), clip_high=0.2, mask=mask
        ).per_token
        return aggregate(per_token, mask, mode="seq-mean-token-mean")

    s = np.exp((0.2 + 0.1 + 0.0) / 3)
    np.testing.assert_allclose(loss(new), -advantage * s, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(new), np.full((1, 3), -advantage * s / 3), rtol=1e-6)
    # All tokens are clipped together, also those whose own ratio lies inside.
    np.testing.assert_allclose(loss(new + 0.3), -advantage * 1.2, rtol=1e-6)
    assert (np.asarray(jax.grad(loss)(new + 0.3)) == 0).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_within_bounds_by_a_loop(level: str) -> None:
    new, old, mask, segments = drawn(1)
    d = np.where(mask, new - old, 0.0)
    if level != "token":
        d = by_loop(d, mask, segments, mean=level == "geometric")
    expected = mask & (np.exp(d) >= 0.8) & (np.exp(d) <= 1.25)
    got = within_bounds(new, old, mask, low=0.8, high=1.25, level=level, segment_ids=segments)
    np.testing.assert_array_equal(got, expected)
    assert expected.any() and (mask & ~expected).any()


def test_both_bounds_are_kept_and_a_nan_is_not() -> None:
    new = jnp.log(jnp.array([0.5, 2.0, 1.0, 1.0]))
    old = jnp.zeros(4).at[3].set(jnp.nan)
    ones = np.ones(4, bool)
    kept = within_bounds(new, old, ones, low=0.499999, high=2.000001)
    np.testing.assert_array_equal(kept, [True, True, True, False])
    assert not np.asarray(within_bounds(new, old, ones, low=0.51, high=1.99))[:2].any()


def test_a_long_sequence_by_its_product_and_by_its_mean() -> None:
    """200 tokens 2 % off each: the product is 52, the geometric mean 1.02."""
    new, old, mask = np.full(200, np.log(1.02)), np.zeros(200), np.ones(200, bool)
    bounds = {"low": 0.5, "high": 2.0}
    assert not np.asarray(within_bounds(new, old, mask, level="sequence", **bounds)).any()
    assert np.asarray(within_bounds(new, old, mask, level="geometric", **bounds)).all()
    assert np.asarray(within_bounds(new, old, mask, level="token", **bounds)).all()


def test_bounds_and_weights_see_the_same_ratio() -> None:
    """What is not capped at 2 and at least .5 is what is kept between .5 and 2."""
    new, old, mask, segments = drawn(2)
    for level in ("token", "sequence"):
        weights = importance_weights(3 * new, 3 * old, mask, level=level, segment_ids=segments)
        kept = within_bounds(
            3 * new, 3 * old, mask, level=level, low=0.5, high=2.0, segment_ids=segments
        )
        np.testing.assert_array_equal(kept, mask & (weights >= 0.5) & (weights <= 2.0))


def test_errors_name_the_argument() -> None:
    ones = np.ones((2, 3), bool)
    x = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 2\)"):
        sequence_log_ratio(x, x[:, :2], ones)
    with pytest.raises(TypeError, match="mask has dtype float32"):
        sequence_log_ratio(x, x, ones.astype(np.float32))
    with pytest.raises(ValueError, match="level='row'"):
        within_bounds(x, x, ones, low=0.5, high=2.0, level="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="high=0"):
        within_bounds(x, x, ones, low=0.0, high=0.0)
    with pytest.raises(ValueError, match="low=-1"):
        within_bounds(x, x, ones, low=-1.0, high=1.0)


# --- importance weights ---


def test_token_and_sequence_weights_by_hand() -> None:
    new, behaviour = np.log([[2.0, 3.0, 5.0]]), np.zeros((1, 3))
    m = [[1, 0, 1]]
    close(importance_weights(new, behaviour, m), [[2, 0, 5]])
    close(importance_weights(new, behaviour, m, cap=4), [[2, 0, 4]])
    close(importance_weights(new, behaviour, m, level="sequence"), [[10, 0, 10]], rtol=1e-5)
    close(importance_weights(new, behaviour, m, level="sequence", cap=4), [[4, 0, 4]])
    ids = [[1, 1, 2]]
    close(
        importance_weights(new, behaviour, [[1, 1, 1]], level="sequence", segment_ids=ids),
        [[6, 6, 5]],
        rtol=2e-6,
    )
    close(
        importance_weights(
            new[0], behaviour[0], [1, 1, 1], level="sequence", segment_ids=[1, 2, 1]
        ),
        [2, 3, 5],
    )


def test_weights_stop_the_gradient_and_are_one_on_policy() -> None:
    new, _, _ = rows(2, 4)
    m = np.ones((2, 4), bool)
    for level in ("token", "sequence"):
        np.testing.assert_array_equal(importance_weights(new, new, m, level=level), m.astype(float))
        g = jax.grad(lambda x, level=level: importance_weights(x, new + 1, m, level=level).sum())(
            new
        )
        assert not np.any(g)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_read_nothing_at_masked_positions_and_stay_finite(level: Any) -> None:
    new, old, _ = rows(3, 4)
    m = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]], bool)
    clean = importance_weights(new, old, m, level=level)
    dirty = importance_weights(np.where(m, new, NAN), np.where(m, old, INF), m, level=level)
    np.testing.assert_array_equal(dirty, clean)
    assert not np.any(np.asarray(clean)[~m])
    close(
        importance_weights([30.0, 30.0], [0.0, 0.0], [1, 1], level=level), np.exp(20.0), rtol=1e-6
    )
    bad = importance_weights([NAN, 0.0], [0.0, 0.0], [1, 1], level=level, cap=2, segment_ids=[1, 2])
    np.testing.assert_array_equal(np.isnan(bad), [True, False])


@given(seed=st.integers(0, 999), ids=st.lists(st.integers(0, 1), min_size=14, max_size=14))
def test_sequence_weights_agree_with_the_loop(seed: int, ids: list) -> None:
    new, old, _ = rows(2, 7, seed=seed)
    m, s = np.random.default_rng(seed).random((2, 7)) < 0.7, np.array(ids).reshape(2, 7)
    expected = np.zeros((2, 7))
    for b in range(2):
        edges = [0, *(np.flatnonzero(np.diff(s[b])) + 1), 7]
        for i, j in zip(edges[:-1], edges[1:], strict=True):
            total = (new - old)[b, i:j][m[b, i:j]].sum()
            expected[b, i:j] = m[b, i:j] * min(np.exp(total), 2.0)
    close(jit_weights(new, old, m, s), expected, rtol=3e-6, atol=2e-6)


jit_weights = jax.jit(
    lambda new, old, m, s: importance_weights(new, old, m, level="sequence", cap=2.0, segment_ids=s)
)
