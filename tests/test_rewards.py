"""Placing scores on tokens, the KL penalty, and the adaptive coefficient."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl import adaptive_kl_coef, ending_scores, gae, overlong_penalty, token_rewards

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
NAN = float("nan")


def test_gae_03_the_score_sits_on_the_last_token_not_on_the_first_pad() -> None:
    mask = jnp.array([True, True, True, False, False])
    rewards = token_rewards(2.0, mask)
    close(rewards, [0, 0, 2, 0, 0])
    close(gae(rewards, jnp.zeros(5), mask, gamma=0.5, lam=1.0).advantages, [0.5, 1, 2, 0, 0])


def test_the_score_skips_holes_and_needs_a_token() -> None:
    mask = [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    close(token_rewards([5, 0.25, NAN], mask), [[0, 0, 5, 0], [0, 0, 0, 0.25], [0, 0, 0, 0]])


def test_the_penalty_is_paid_at_valid_tokens() -> None:
    kl = [[1.0, 2.0, NAN]]
    close(token_rewards([10.0], [[1, 1, 0]], kl=kl, kl_coef=0.5), [[-0.5, 9.0, 0.0]])


def test_segments_read_their_score_at_their_last_token() -> None:
    scores = [[NAN, 3.0, NAN, NAN, 7.0, 1.0]]
    ids, mask = [[1, 1, 2, 2, 2, 1]], [[1, 1, 0, 1, 1, 1]]
    close(token_rewards(scores, mask, segment_ids=ids), [[0, 3, 0, 0, 7, 1]])


def test_score_mask_says_where_the_score_may_sit() -> None:
    # The response ends with two tokens of a tool; the score goes to the last token of all.
    mask, everything = [[1, 1, 0, 0, 0]], [[1, 1, 1, 1, 0]]
    kl = jnp.ones((1, 5))
    close(token_rewards([2.0], mask, kl=kl, kl_coef=0.1), [[-0.1, 1.9, 0, 0, 0]])
    close(
        token_rewards([2.0], mask, kl=kl, kl_coef=0.1, score_mask=everything),
        [[-0.1, -0.1, 0, 2, 0]],
    )


@given(
    mask=st.lists(st.booleans(), min_size=14, max_size=14),
    ids=st.lists(st.integers(0, 2), min_size=14, max_size=14),
)
def test_placement_agrees_with_the_loop(mask: list, ids: list) -> None:
    m, s = np.array(mask).reshape(2, 7), np.array(ids).reshape(2, 7)
    scores = np.arange(1.0, 15).reshape(2, 7)
    expected, by_row = np.zeros((2, 7)), np.zeros((2, 7))
    for b in range(2):
        edges = [0, *(np.flatnonzero(np.diff(s[b])) + 1), 7]
        for i, j in zip(edges[:-1], edges[1:], strict=True):
            steps = i + np.flatnonzero(m[b, i:j])
            expected[b, steps[-1:]] = scores[b, steps[-1:]]
        by_row[b, np.flatnonzero(m[b])[-1:]] = b + 1
    close(jitted(scores, m, segment_ids=s), expected)
    close(jitted(np.array([1, 2]), m), by_row)


jitted = jax.jit(token_rewards)


def test_fractions_survive_integer_masks_and_any_dtype() -> None:
    for dtype in (np.float16, jnp.bfloat16, np.float64, np.int32):
        r = token_rewards(np.array([1, 2], dtype), np.ones((2, 2), np.int64))
        assert r.dtype == jnp.float32
        close(r, [[0, 1], [0, 2]])
    close(token_rewards([0.5, -0.7], np.ones((2, 2), int)), [[0, 0.5], [0, -0.7]])


def test_gradients_are_finite_and_zero_at_masked_positions() -> None:
    m = jnp.array([[True, True, False], [False, False, False]])
    kl, scores = jnp.array([[1.0, 2.0, NAN], [NAN, NAN, NAN]]), jnp.array([1.0, NAN])
    f = lambda s, kl, coef: token_rewards(s, m, kl=kl, kl_coef=coef).sum()  # noqa: E731
    value, (gs, gk, gc) = jax.value_and_grad(f, argnums=(0, 1, 2))(scores, kl, 0.5)
    close(value, 1 - 1.5)
    close(gs, [1, 0])
    close(gk, [[-0.5, -0.5, 0], [0, 0, 0]])
    close(gc, -3)


def test_valid_nan_stays_visible() -> None:
    assert np.isnan(token_rewards([NAN], [[1, 1]])).tolist() == [[False, True]]
    r = token_rewards([1.0], [[1, 1]], kl=[[NAN, 0.0]], kl_coef=0.1)
    assert np.isnan(r).tolist() == [[True, False]]


def test_empty_and_many_axes() -> None:
    assert token_rewards(np.zeros(2), np.zeros((2, 0), bool)).shape == (2, 0)
    assert token_rewards(np.zeros((0,)), np.zeros((0, 3), bool)).shape == (0, 3)
    r = token_rewards(np.ones((2, 2)), np.ones((2, 2, 3), bool))
    close(r[..., -1], 1)
    close(jax.vmap(token_rewards)(np.ones((2, 2)), np.ones((2, 2, 3), bool)), r)


M = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        (([1.0], M), {}, ValueError, r"scores has shape \(1,\); expected \(2,\)"),
        ((np.zeros((2, 3)), M), {}, ValueError, r"scores has shape \(2, 3\); expected \(2,\)"),
        (
            ([1.0, 2], M),
            {"segment_ids": M * 1},
            ValueError,
            r"scores has shape \(2,\); expected \(2, 3\)",
        ),
        (([1.0, 2], M * 1.0), {}, TypeError, "mask has dtype"),
        (([1.0, 2], M * 2), {}, ValueError, "mask holds 2"),
        ((1.0, True), {}, ValueError, r"mask has shape \(\)"),
        (([1.0, 2], M), {"kl": np.zeros(3), "kl_coef": 1.0}, ValueError, r"kl has shape \(3,\)"),
        (([1.0, 2], M), {"kl_coef": 0.1}, ValueError, "kl_coef=0.1 without kl"),
        (
            ([1.0, 2], M),
            {"kl": np.zeros((2, 3)), "kl_coef": [1.0]},
            ValueError,
            "kl_coef has shape",
        ),
        (([1.0, 2], M), {"score_mask": M * 1.0}, TypeError, "score_mask has dtype"),
        (([1.0, 2], M), {"score_mask": M[:1]}, ValueError, "score_mask has shape"),
        ((np.zeros((2, 3)), M), {"segment_ids": M * 1.0}, TypeError, "segment_ids has dtype"),
    ],
)
def test_refusals_name_the_argument(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        token_rewards(*args, **options)


# --- the controller ---


@pytest.mark.parametrize(
    ("observed", "expected"), [(0.2, 0.100512), (0.05, 0.099488), (0.101, 0.1000256)]
)
def test_kl_06_the_error_is_clipped_to_a_fifth(observed: float, expected: float) -> None:
    control = partial(adaptive_kl_coef, target=0.1, horizon=10000, n=256)
    close(control(0.1, observed), expected)
    close(jax.jit(control)(0.1, observed), expected)


def test_on_target_the_coefficient_stays() -> None:
    close(adaptive_kl_coef(0.3, 0.1, target=0.1, horizon=100, n=50), 0.3)
    close(adaptive_kl_coef(0.3, 9.0, target=0.1, horizon=100, n=0), 0.3)


@pytest.mark.parametrize("wrong", [{"target": 0}, {"horizon": -1}, {"n": -1}, {"target": NAN}])
def test_controller_refusals(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        adaptive_kl_coef(0.1, 0.1, **({"target": 0.1, "horizon": 10, "n": 1} | wrong))


# --- endings ---


def test_overlong_penalty_by_hand() -> None:
    """DAPO, equation 13: limit 20, buffer 4; nothing up to 16, half at 18, all from 20 on."""
    got = overlong_penalty([1, 16, 17, 18, 20, 25], max_length=20, buffer=4, penalty=2.0)
    np.testing.assert_allclose(got, [0, 0, -0.5, -1.0, -2.0, -2.0], atol=1e-6)
    with pytest.raises(ValueError, match="buffer=0"):
        overlong_penalty([1], max_length=20, buffer=0)
    with pytest.raises(ValueError, match="penalty=-1"):
        overlong_penalty([1], max_length=20, buffer=4, penalty=-1)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("keep", [1.0, 2.0, 3.0]),
        ("mask", [1.0, 2.0, 3.0]),
        ("zero", [1.0, 0.0, 3.0]),
        ("bootstrap", [1.0, 0.0, 3.0]),
        ("soft", [1.0, 1.0, 2.5]),
    ],
)
def test_what_a_truncated_response_scores(mode: Any, expected: list[float]) -> None:
    """The second is cut at the limit of 8; the third ends by itself at 6, in the buffer of 4."""
    given = ([1.0, 2.0, 3.0], [False, True, False], [3, 8, 6])
    limits = {"max_length": 8, "buffer": 4, "penalty": 1.0}
    np.testing.assert_allclose(ending_scores(*given, mode=mode, **limits), expected, atol=1e-6)
    fined = ending_scores(*given, mode=mode, missing_eos_penalty=0.5, **limits)
    np.testing.assert_allclose(fined, np.array(expected) - [0, 0.5, 0], atol=1e-6)


def test_ending_scores_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ValueError, match="mode='cut'"):
        ending_scores([1.0], [True], [1], mode="cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="missing_eos_penalty=-1"):
        ending_scores([1.0], [True], [1], missing_eos_penalty=-1)
    with pytest.raises(ValueError, match=r"truncated has shape \(2,\)"):
        ending_scores([1.0], [True, False], [1])
