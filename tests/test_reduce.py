"""Masked means, whitening, loss aggregation and weighted metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import Weighted, aggregate, masked_mean, sum_finite, whiten

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN = float("nan")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


# --- masked_mean ---


def test_mean_by_hand_over_any_axis() -> None:
    x = jnp.array([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    m = jnp.array([[1, 1, 0], [1, 0, 0]])
    close(masked_mean(x, m), 7 / 3)
    close(masked_mean(x, m, axis=-1), [1.5, 4.0])
    close(masked_mean(x, m, axis=0), [2.5, 2.0, 0.0])
    close(masked_mean(x, m, axis=(0, 1)), 7 / 3)
    close(masked_mean([3, 5], [True, True]), 4.0)


def test_ml_01_the_sentinel_of_pads_is_not_averaged() -> None:
    logprobs, mask = jnp.array([-1.0, -2.0, 1.0, 1.0]), jnp.array([1, 1, 0, 0])
    close(masked_mean(-logprobs, mask), 1.5)


@pytest.mark.parametrize("padded", [4, 8])
def test_ml_02_a_metric_does_not_grow_with_padding(padded: int) -> None:
    kl = jnp.full(padded, 5.0).at[:2].set(jnp.array([0.1, 0.3]))
    close(masked_mean(kl, jnp.arange(padded) < 2), 0.2)


def test_mean_of_nothing_is_zero_with_zero_gradient() -> None:
    value, g = jax.value_and_grad(lambda x: masked_mean(x, jnp.zeros(3, bool)))(jnp.full(3, NAN))
    assert value == 0 and not np.any(g)
    assert masked_mean(np.zeros((0, 2)), np.zeros((0, 2), bool)) == 0


@pytest.mark.parametrize("dtype", [np.int32, np.float16, jnp.bfloat16, np.float64, bool])
def test_mean_is_float32(dtype: Any) -> None:
    mean = masked_mean(np.array([1, 0, 1, 1], dtype), [1, 1, 1, 1])
    assert mean.dtype == jnp.float32
    close(mean, 0.75)


# --- whiten ---


def test_gae_09_mean_and_variance_are_both_over_valid_cells() -> None:
    close(whiten([1.0, 3, 0, 0], [1, 1, 0, 0]), [-1, 1, 0, 0])
    close(whiten([1.0, 3, 0, 0], [1, 1, 0, 0], ddof=1)[:2], [-(0.5**0.5), 0.5**0.5])
    close(whiten([1.0, 3, 99, -99], [1, 1, 0, 0]), [-1, 1, 0, 0])


def test_gae_12_the_whole_batch_is_whitened_at_once() -> None:
    x = jnp.array([[1.0, 2.0], [3.0, 10.0]])
    expected = [[-0.848528, -0.565685], [-0.282843, 1.697056]]
    close(whiten(x, jnp.ones((2, 2), bool)), expected)


@pytest.mark.parametrize("valid", [0, 1])
@pytest.mark.parametrize("value", [2.0, 0.1, 1e6, 12345.678])
def test_gae_08_no_variance_or_nothing_valid(value: float, valid: int) -> None:
    x, m = jnp.full(1001, value), jnp.full(1001, valid)
    y, pull = jax.vjp(lambda x: whiten(x, m), x)
    np.testing.assert_array_equal(y, np.zeros(1001))
    assert np.isfinite(pull(jnp.ones(1001))[0]).all()
    np.testing.assert_array_equal(whiten(x, m, eps=0.0), np.zeros(1001))


@pytest.mark.parametrize("ddof", [0, 1, 2])
def test_one_valid_cell_gives_zero_or_its_mean(ddof: int) -> None:
    close(whiten([5.0, 7.0], [1, 0], ddof=ddof), [0, 0])
    close(whiten([5.0, 7.0], [1, 0], ddof=ddof, shift_mean=False), [5, 0])


@given(
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
    ddof=st.integers(0, 1),
    shift_mean=st.booleans(),
    seed=st.integers(0, 99),
)
def test_whitening_agrees_with_numpy(mask: list, ddof: int, shift_mean: bool, seed: int) -> None:
    m = np.array(mask).reshape(3, 4)
    x = np.random.default_rng(seed).normal(size=(3, 4)) + 2
    expected = np.zeros((3, 4))
    if m.sum() > ddof:
        mean, var = x[m].mean(), x[m].var(ddof=ddof)
        expected[m] = (x[m] - mean) / np.sqrt(var + 1e-8) + (0 if shift_mean else mean)
    elif m.any():
        expected[m] = 0 if shift_mean else x[m].mean()
    got = jit_whiten(x, m, ddof=ddof, shift_mean=shift_mean)
    # One cell away from its rounded mean by 1e-7 is divided by √1e-8.
    close(got, expected, atol=1e-5 if m.sum() > 1 else 1e-3, rtol=1e-5)


jit_whiten = jax.jit(whiten, static_argnames=("ddof", "shift_mean"))


def test_whitened_masked_cells_are_zero_and_poison_free() -> None:
    m = jnp.array([True, True, True, False])
    f = lambda x: (whiten(x, m, shift_mean=False) ** 3).sum()  # noqa: E731
    clean = jax.value_and_grad(f)(jnp.array([1.0, 2.0, 4.0, 0.0]))
    dirty = jax.value_and_grad(f)(jnp.array([1.0, 2.0, 4.0, NAN]))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert dirty[1][3] == 0


def test_the_gradient_of_whitening_is_that_of_the_formula() -> None:
    """Of Σ w y, y = (x - mean) / s over n cells: (w - mean(w) - y mean(w y)) / s."""
    x, w = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    m = np.array([True] * 7 + [False] * 2)
    grad = jax.grad(lambda x: (w * whiten(x, m)).sum())(x)
    y = (x[m].astype(float) - x[m].mean(dtype=float)) / x[m].std(dtype=float)
    v = w[m].astype(float)
    expected = (v - v.mean() - y * (v * y).mean()) / x[m].std(dtype=float)
    close(grad[m], expected)
    assert not grad[~m].any()


def test_a_large_offset_costs_no_precision() -> None:
    x = 1e7 + np.arange(100) ** 2 % 97
    close(whiten(x, np.ones(100, bool)), (x - x.mean()) / x.std(), atol=1e-5, rtol=1e-5)


def test_whitening_keeps_valid_nan_visible() -> None:
    assert np.isnan(whiten([1.0, NAN, 2.0], [1, 1, 0])[:2]).all()


# --- aggregate ---


def test_ag_07_each_mode_computes_what_its_name_says() -> None:
    x = jnp.array([[4.0, 0, 0], [1.0, 1.0, 1.0]])
    m = jnp.array([[1, 0, 0], [1, 1, 1]])
    close(aggregate(x, m, mode="token-mean"), 1.75)
    close(aggregate(x, m, mode="seq-mean-token-mean"), 2.5)
    close(aggregate(x, m, mode="seq-mean-token-sum"), 3.5)
    close(aggregate(x, m, mode="seq-mean-token-sum-norm", horizon=2), 3.5)
    close(aggregate(x, m, mode="seq-mean-token-sum-norm", horizon=10), 0.7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", [None, 0])
def test_ag_04_nothing_valid_gives_zero_and_zero_gradients(mode: Any, denominator: Any) -> None:
    f = lambda x: aggregate(  # noqa: E731
        x, jnp.zeros((2, 3), bool), mode=mode, horizon=3, denominator=denominator
    )
    value, g = jax.value_and_grad(f)(jnp.full((2, 3), NAN))
    assert value == 0 and not np.any(g)


def test_ag_05_a_part_without_tokens_does_not_dilute_the_rest() -> None:
    x, m = jnp.array([[2.0, 4.0], [NAN, NAN]]), jnp.array([[1, 1], [0, 0]])
    for mode in ("token-mean", "seq-mean-token-mean"):
        close(aggregate(x, m, mode=mode), 3.0)
    close(aggregate(x, m, mode="seq-mean-token-sum"), 6.0)
    parts = [
        aggregate(x[i : i + 1], m[i : i + 1], mode="token-mean", denominator=2) for i in (0, 1)
    ]
    close(sum(parts), 3.0)


def test_ag_02_parts_with_the_global_count_add_up_where_a_mean_of_means_does_not() -> None:
    x, m = jnp.array([[1.0] * 5, [7.0] * 5]), jnp.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    parts = [aggregate(x[i], m[i], mode="token-mean", denominator=m.sum()) for i in (0, 1)]
    close(sum(parts), 2.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_losses_and_gradients_of_any_split_add_up(mode: Any, packed: bool, size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(8, 7)).astype(np.float32)
    m = rng.random((8, 7)) < np.linspace(0, 1, 8)[:, None]
    ids = rng.integers(0, 2, (8, 7)) if packed else None
    count = (
        m.sum()
        if mode == "token-mean"
        else sum(
            bool(m[b][run].any())
            for b in range(8)
            for run in runs(None if ids is None else ids[b], 7)
        )
    )
    f = jax.value_and_grad(
        lambda x, m, ids, count: aggregate(
            x, m, mode=mode, segment_ids=ids, horizon=5, denominator=count
        )
    )
    whole = f(x, m, ids, None)
    cuts = [slice(i, i + size) for i in range(0, 8, size)]
    parts = [f(x[c], m[c], None if ids is None else ids[c], count) for c in cuts]
    close(sum(p[0] for p in parts), whole[0])
    close(np.concatenate([p[1] for p in parts]), whole[1])
    assert not np.any(np.asarray(whole[1])[~m])


def runs(ids: Any, length: int) -> list[slice]:
    """Slices of the maximal runs of equal ids of one row."""
    edges = [0, length] if ids is None else [0, *(np.flatnonzero(np.diff(ids)) + 1), length]
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


@given(
    mask=st.lists(st.booleans(), min_size=16, max_size=16),
    ids=st.lists(st.integers(0, 2), min_size=16, max_size=16),
    seed=st.integers(0, 99),
)
def test_segments_agree_with_the_loop(mask: list, ids: list, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(2, 8))
    m, s = np.array(mask).reshape(2, 8), np.array(ids).reshape(2, 8)
    sequences = [x[b][r][m[b][r]] for b in range(2) for r in runs(s[b], 8)]
    sequences = [q for q in sequences if q.size] or [np.zeros(1)]
    expected = {
        "token-mean": np.concatenate(sequences).mean(),
        "seq-mean-token-mean": np.mean([q.mean() for q in sequences]),
        "seq-mean-token-sum": np.mean([q.sum() for q in sequences]),
        "seq-mean-token-sum-norm": np.concatenate(sequences).sum() / 5,
    }
    for mode, value in expected.items():
        close(jit_aggregate(x, m, s, mode=mode), value, atol=2e-6)


jit_aggregate = jax.jit(
    lambda x, m, s, mode: aggregate(x, m, mode=mode, segment_ids=s, horizon=5),
    static_argnames="mode",
)


def test_aggregate_works_under_jit_vmap_and_on_one_row() -> None:
    x, m = jnp.arange(6.0).reshape(2, 3), jnp.array([[1, 1, 0], [0, 1, 1]])
    f = partial(aggregate, mode="seq-mean-token-mean", segment_ids=None)
    close(jax.jit(f)(x, m), f(x, m))
    close(jax.vmap(f)(x, m), [f(x[0], m[0]), f(x[1], m[1])])
    ids = jnp.array([[1, 1, 2], [3, 3, 3]])
    g = lambda x, m, ids: aggregate(x, m, mode="seq-mean-token-sum", segment_ids=ids)  # noqa: E731
    close(jax.vmap(g)(x, m, ids), [1.0, 9.0])
    assert (
        aggregate(
            jnp.zeros((2, 0)),
            jnp.zeros((2, 0), bool),
            mode="seq-mean-token-sum",
            segment_ids=jnp.zeros((2, 0), int),
        )
        == 0
    )


def test_a_valid_nan_stays_visible() -> None:
    for mode in MODES:
        assert np.isnan(aggregate([NAN, 1.0], [1, 1], mode=mode, horizon=2))


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (
            ([1.0], [1]),
            {"mode": "sum"},
            ValueError,
            "mode='sum'; expected one of 'token-mean', 'seq-mean",
        ),
        (([1.0], [1]), {"mode": MODES[3]}, ValueError, "horizon is missing"),
        (
            ([1.0], [1]),
            {"mode": MODES[3], "horizon": 0},
            ValueError,
            "horizon=0; expected a number > 0",
        ),
        (([1.0], [1]), {"mode": MODES[0], "denominator": -1}, ValueError, "denominator=-1"),
        (
            ([1.0], [1]),
            {"mode": MODES[0], "denominator": [1.0]},
            ValueError,
            r"denominator has shape \(1,\)",
        ),
        (
            ([1.0], [1, 1]),
            {"mode": MODES[0]},
            ValueError,
            r"mask has shape \(2,\); expected \(1,\)",
        ),
        (([1.0], [1.0]), {"mode": MODES[0]}, TypeError, "mask has dtype"),
        ((1.0, True), {"mode": MODES[0]}, ValueError, r"per_token has shape \(\)"),
        (
            ([1.0], [1]),
            {"mode": MODES[0], "segment_ids": [1, 2]},
            ValueError,
            "segment_ids has shape",
        ),
    ],
)
def test_aggregate_refusals(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        aggregate(*args, **options)


@pytest.mark.parametrize("f", [masked_mean, whiten])
def test_mean_and_whitening_refusals(f: Any) -> None:
    for mask, error, message in (
        (np.ones(2, bool), ValueError, r"mask has shape \(2,\); expected \(3,\), that of x"),
        (np.ones(3), TypeError, "mask has dtype float64; expected bool, or integer 0/1"),
        (np.array([1, 2, 0]), ValueError, "mask holds 2"),
        (None, TypeError, "mask is None"),
    ):
        with pytest.raises(error, match=message):
            f(np.zeros(3), mask)
    with pytest.raises(TypeError, match="real numbers"):
        f(np.zeros(3, complex), [1, 1, 1])
    with pytest.raises(TypeError, match="real numbers"):
        f(["a", "b", "c"], [1, 1, 1])


def test_whitening_refuses_bad_constants() -> None:
    for options, error, message in (
        ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
        ({"ddof": -1}, ValueError, "ddof=-1"),
        ({"ddof": 0.5}, TypeError, "ddof=0.5"),
    ):
        with pytest.raises(error, match=message):
            whiten([1.0], [1], **options)


# --- Weighted ---


def test_weighted_parts_are_divided_once() -> None:
    whole = Weighted(5.0, 5.0) + Weighted(7.0, 1.0)
    close(whole.mean(), 2.0)
    close((Weighted(0.0, 0.0) + whole).mean(), 2.0)
    assert Weighted(0.0, 0.0).mean() == 0


def test_weighted_of_values_equals_the_mean_over_all_of_them() -> None:
    x, m = jnp.array([[1.0, 2.0, NAN], [4.0, NAN, NAN]]), jnp.array([[1, 1, 0], [1, 0, 0]])
    parts = [Weighted.of(x[i], m[i]) for i in (0, 1)]
    close((parts[0] + parts[1]).mean(), masked_mean(x, m))


def test_weighted_is_a_tree_that_goes_through_scan() -> None:
    xs = jnp.array([[1.0, 2.0], [3.0, 4.0]])

    def add(carry: Weighted, x: jax.Array) -> tuple[Weighted, None]:
        return carry + Weighted.of(x, jnp.array([True, False])), None

    whole, _ = jax.lax.scan(add, Weighted(jnp.float32(0), jnp.float32(0)), xs)
    close(whole.mean(), 2.0)


def test_ml_04_invalid_parts_are_counted_and_left_out() -> None:
    whole, invalid = sum_finite([Weighted(1.0, 1.0), Weighted(NAN, 1.0), Weighted(3.0, 1.0)])
    close((whole.mean(), invalid), (2.0, 1.0))
    nothing, invalid = sum_finite([Weighted(NAN, 1.0)])
    assert nothing.mean() == 0 and nothing.weight == 0 and invalid == 1
