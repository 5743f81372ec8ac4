"""Whitening within groups, and the lambda that follows the length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import adaptive_lambda, gae, whiten, whiten_groups


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
