"""Shaped scores against a reference that remembers every score of the run."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from jaxrl.config import RewardConfig
from jaxrl.errors import RewardError
from jaxrl.score_shaping import merge_moments, shape_scores

NONE = np.zeros(3, np.float32)


def shape(
    values: list[float], moments: np.ndarray = NONE, valid: list[bool] | None = None, **keys: Any
) -> tuple[list[float], np.ndarray]:
    mask = np.array([True] * len(values) if valid is None else valid, bool)
    shaped, after = shape_scores(np.array(values, np.float32), mask, RewardConfig(**keys), moments)
    assert shaped.dtype == after.dtype == np.float32 and after.shape == (3,)
    return shaped.tolist(), after


def test_nothing_is_changed_by_default_and_nothing_is_counted() -> None:
    shaped, after = shape([1.5, -2.0], np.array([4, 1, 2], np.float32))
    assert shaped == [1.5, -2.0] and after.tolist() == [4, 1, 2]


def test_by_hand() -> None:
    # 1, 3: mean 2, M2 2. With 5, 7 too: mean 4, M2 9 + 1 + 1 + 9 = 20, deviation sqrt(5).
    shaped, moments = shape([1.0, 3.0], normalise="mean_std")
    assert shaped == [-1.0, 1.0] and moments.tolist() == [2, 2, 2]
    shaped, moments = shape([5.0, 7.0], moments, normalise="mean_std")
    np.testing.assert_allclose(shaped, [1 / 5**0.5, 3 / 5**0.5], rtol=1e-6)
    assert moments.tolist() == [4, 4, 20]
    shaped, _ = shape([5.0, 7.0], np.array([2, 2, 2], np.float32), normalise="std")
    np.testing.assert_allclose(shaped, [5 / 5**0.5, 7 / 5**0.5], rtol=1e-6)


def test_the_order_is_normalise_scale_shift_clip() -> None:
    # 0, 4: z = -1, 1; times 3: -3, 3; plus 2: -1, 5; at most 4: -1, 4.
    assert shape([0.0, 4.0], normalise="mean_std", scale=3.0, shift=2.0, clip=4.0)[0] == [-1, 4]
    assert shape([0.0, -4.0], scale=3.0, shift=2.0, clip=4.0)[0] == [2, -4]


@pytest.mark.parametrize("normalise", ["std", "mean_std"])
def test_it_equals_a_recomputation_over_all_scores_so_far(normalise: str) -> None:
    rng = np.random.default_rng(0)
    seen: list[float] = []
    moments = NONE
    for size in (3, 1, 0, 64, 7, 200):
        values = (5 + 2 * rng.standard_normal(size)).astype(np.float32)
        valid = rng.random(size) < 0.8
        values[~valid] = 0
        seen += values[valid].astype(float).tolist()
        shaped, moments = shape(
            values.tolist(), moments, valid.tolist(), normalise=normalise, scale=0.5, shift=1.0
        )
        deviation = statistics.pstdev(seen) or 1.0
        mean = statistics.fmean(seen) if normalise == "mean_std" else 0.0
        expected = [
            0.5 * (value - mean) / deviation + 1 if use else 0.0
            for value, use in zip(values.tolist(), valid, strict=True)
        ]
        np.testing.assert_allclose(shaped, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        moments, [len(seen), statistics.fmean(seen), statistics.pvariance(seen) * len(seen)], 1e-5
    )


def test_invalid_entries_are_neither_counted_nor_shaped() -> None:
    shaped, moments = shape([1.0, 100.0, 3.0], valid=[True, False, True], normalise="std", shift=9)
    assert shaped == [10.0, 0.0, 12.0] and moments.tolist() == [2, 2, 2]
    shaped, moments = shape([7.0], moments, [False], normalise="mean_std")
    assert shaped == [0.0] and moments.tolist() == [2, 2, 2]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6, 1e-30])
def test_equal_scores_divide_nothing(value: float) -> None:
    moments = NONE
    for size in (3, 7, 1):
        shaped, moments = shape([value] * size, moments, normalise="std")
        np.testing.assert_allclose(shaped, [value] * size, rtol=1e-7)
        assert shape([value] * size, moments, normalise="mean_std")[0] == [0.0] * size


@pytest.mark.parametrize("value", [1.0, -3e4])
def test_rounding_is_no_deviation(value: float) -> None:
    # The same sum in another order: the last bit of one of twenty scores.
    values = [value] * 19 + [float(np.nextafter(np.float32(value), np.float32(np.inf)))]
    shaped, _ = shape(values, normalise="mean_std")
    assert max(map(abs, shaped)) < 1e-6 * abs(value)
    assert shape(values, normalise="std")[0] == values


def test_a_small_deviation_is_still_one() -> None:
    # A hundred-thousandth of the mean is more than float32's rounding of it.
    shaped, _ = shape([1.0, 1.00002], normalise="mean_std")
    np.testing.assert_allclose(shaped, [-1, 1], rtol=1e-5)


def test_the_moments_survive_float32() -> None:
    rng = np.random.default_rng(1)
    moments, everything = NONE, []
    for _ in range(3000):
        values = (1000 + rng.standard_normal(16)).astype(np.float32)
        everything.append(values)
        _, moments = shape_scores(values, np.ones(16, bool), RewardConfig(normalise="std"), moments)
    scores = np.concatenate(everything).astype(np.float64)
    # A mean a thousand deviations from zero, rounded 3000 times: the last digits are gone.
    np.testing.assert_allclose(moments[:2], [scores.size, scores.mean()], rtol=3e-6)
    np.testing.assert_allclose(np.sqrt(moments[2] / moments[0]), scores.std(), rtol=2e-4)


def test_merging_does_not_depend_on_the_cut() -> None:
    values = np.random.default_rng(2).standard_normal(50)
    whole = merge_moments(NONE, values)
    np.testing.assert_allclose(merge_moments(merge_moments(NONE, values[:9]), values[9:]), whole)
    np.testing.assert_allclose(whole, [50, values.mean(), values.var() * 50])


@pytest.mark.parametrize("keys", [{"scale": 1e10}, {"normalise": "std"}])
def test_what_does_not_fit_float32_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"scores up to 2e\+30 .*do not fit float32"):
        shape([1e30, -2e30], **keys)
