"""Filters and the draw: hand values, plain numpy and transformers as references, frequencies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxrl.models.sampling import BLOCK, Draw, Knobs, draw, filter_logits
from jaxrl.types import Sampling

HAND = np.log(np.array([[0.4, 0.1, 0.3, 0.2]], np.float32))


def keys_of(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def knobs_of(temperature: float = 1.0, **filters: float) -> Knobs:
    return Knobs.of(Sampling(max_new_tokens=1, temperature=temperature, **filters))  # type: ignore[arg-type]


def draw_many(probabilities: list[float], count: int, knobs: Knobs, seed: int = 0) -> Draw:
    logits = jnp.tile(jnp.log(jnp.array(probabilities, jnp.float32))[None], (count, 1))
    return jax.jit(draw)(keys_of(count, seed), logits, knobs)


def slow_filter(
    logits: np.ndarray, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[bool]:
    """One row, token by token, in float64: what may be drawn."""
    kept = dict(enumerate(np.exp(logits.astype(np.float64))))
    if top_k is not None:
        kept = dict(sorted(kept.items(), key=lambda item: -item[1])[:top_k])
    if top_p is not None:
        total, mass, inside = sum(kept.values()), 0.0, {}
        for token, weight in sorted(kept.items(), key=lambda item: -item[1]):
            if mass < top_p:
                inside[token] = weight
            mass += weight / total
        kept = inside
    if min_p is not None:
        kept = {t: w for t, w in kept.items() if w >= min_p * max(kept.values())}
    return [token in kept for token in range(len(logits))]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [True, True, True, True]),
        ({"top_k": 1}, [True, False, False, False]),
        ({"top_k": 3}, [True, False, True, True]),
        ({"top_k": 99}, [True, True, True, True]),
        # Mass above each token, likeliest first: 0, .4, .7, .9.
        ({"top_p": 0.01}, [True, False, False, False]),
        ({"top_p": 0.69}, [True, False, True, False]),
        ({"top_p": 0.71}, [True, False, True, True]),
        ({"top_p": 0.95}, [True, True, True, True]),
        # .3 / .4 = .75, .2 / .4 = .5, .1 / .4 = .25
        ({"min_p": 0.7}, [True, False, True, False]),
        ({"min_p": 0.49}, [True, False, True, True]),
        ({"min_p": 1.0}, [True, False, False, False]),
        # Renormalised after top_k: .4/.7 = .571 stands above the second.
        ({"top_k": 2, "top_p": 0.57}, [True, False, False, False]),
        ({"top_k": 2, "top_p": 0.58}, [True, False, True, False]),
        ({"top_k": 3, "min_p": 0.7}, [True, False, True, False]),
    ],
)
def test_filters_by_hand(filters: dict[str, float], kept: list[bool]) -> None:
    out = np.asarray(filter_logits(jnp.asarray(HAND), **filters))  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.isfinite(out[0]), kept)
    np.testing.assert_array_equal(out[0][kept], HAND[0][kept])
    assert np.all(out[0][~np.array(kept)] == -np.inf)


@pytest.mark.parametrize("top_k", [None, 1, 7, 40])
@pytest.mark.parametrize("top_p", [None, 0.2, 0.9])
@pytest.mark.parametrize("min_p", [None, 0.05, 0.6])
def test_filters_equal_a_slow_loop_and_transformers(
    top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    logits = np.random.default_rng(3).normal(0, 2, (6, 61)).astype(np.float32)
    ours = np.isfinite(
        np.asarray(filter_logits(jnp.asarray(logits), top_k=top_k, top_p=top_p, min_p=min_p))
    )
    np.testing.assert_array_equal(ours, [slow_filter(row, top_k, top_p, min_p) for row in logits])
    theirs, ids = torch.tensor(logits), torch.zeros((6, 1), dtype=torch.long)
    for value, warper in ((top_k, TopKLogitsWarper), (top_p, TopPLogitsWarper)):
        theirs = theirs if value is None else warper(value)(ids, theirs)
    theirs = theirs if min_p is None else MinPLogitsWarper(min_p)(ids, theirs)
    np.testing.assert_array_equal(ours, np.isfinite(theirs.numpy()))


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = jnp.array([[1.0, 3.0, 1.0, 0.0]])
    for filters in ({"top_k": 2}, {"top_p": 0.8}):
        out = filter_logits(logits, **filters)  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.isfinite(out[0]), [True, True, True, False])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature: float) -> None:
    p, count = np.array([0.5, 0.25, 0.15, 0.08, 0.02]), 40_000
    tokens = np.asarray(draw_many(p.tolist(), count, knobs_of(temperature)).tokens)
    expected = p ** (1 / temperature) / np.sum(p ** (1 / temperature)) * count
    observed = np.bincount(tokens, minlength=5)
    # Chi-square with 4 degrees of freedom exceeds 23.5 once in 10,000.
    assert np.sum((observed - expected) ** 2 / expected) < 23.5


def test_frequencies_across_blocks() -> None:
    """A vocabulary of several blocks, its last one ragged, with mass in each."""
    vocab, count = 3 * BLOCK + 7, 60_000
    p = np.full(vocab, 1e-9)
    places = [0, BLOCK - 1, BLOCK, 2 * BLOCK + 100, 3 * BLOCK, vocab - 1]
    p[places] = [0.1, 0.2, 0.05, 0.3, 0.05, 0.3]
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (count, vocab))
    tokens = np.asarray(jax.jit(draw)(keys_of(count), logits, knobs_of()).tokens)
    observed = np.array([np.sum(tokens == place) for place in places])
    assert observed.sum() >= count - 1
    # Chi-square with 5 degrees of freedom exceeds 25.7 once in 10,000.
    assert np.sum((observed - p[places] * count) ** 2 / (p[places] * count)) < 25.7


def test_filtered_tokens_are_never_drawn_and_frequencies_are_renormalised() -> None:
    tokens = np.asarray(draw_many([0.4, 0.1, 0.3, 0.2], 20_000, knobs_of(top_k=2)).tokens)
    observed = np.bincount(tokens, minlength=4)
    assert observed[1] == observed[3] == 0
    # Four standard deviations of a share of 4/7 in 20,000 are .014.
    assert abs(observed[0] / 20_000 - 4 / 7) < 0.014


def test_an_impossible_token_is_never_drawn() -> None:
    """Also where the cumulative sum rounds: mass only in the middle of a padded block."""
    logits = jnp.full((5_000, BLOCK + 3), -jnp.inf).at[:, 5:8].set(jnp.array([0.0, -9.0, -17.0]))
    tokens = np.asarray(draw(keys_of(5_000), logits, knobs_of()).tokens)
    assert set(tokens.tolist()) <= {5, 6, 7}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_logprobs_are_those_of_the_softmax_under_the_temperature(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (64, 300)).astype(np.float32)
    knobs = knobs_of(temperature)
    tokens, logprobs = draw(keys_of(64), jnp.asarray(logits), knobs)
    z = logits.astype(np.float64) / temperature
    dense = z - np.log(np.exp(z).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, dense[np.arange(64), np.asarray(tokens)], atol=1e-5)


def test_filtered_draws_report_what_they_were_drawn_with() -> None:
    """p = [.6, .3, .1], top_p .8 leaves the first two: .6 / .9 and .3 / .9."""
    tokens, logprobs = draw_many([0.6, 0.3, 0.1], 100, knobs_of(top_p=0.8))
    assert set(np.asarray(tokens).tolist()) == {0, 1}
    expected = np.where(np.asarray(tokens) == 0, -0.405465, -1.098612)
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)
    _, alone = draw_many([0.6, 0.3, 0.1], 10, knobs_of(top_k=1))
    np.testing.assert_allclose(alone, 0.0, atol=1e-6)


def test_greedy_takes_the_first_largest_and_reports_temperature_one() -> None:
    logits = jnp.log(jnp.array([[0.2, 0.4, 0.4], [0.7, 0.2, 0.1]]))
    # Filters cannot matter to greedy, and are not compiled into it.
    knobs = knobs_of(0.0, top_k=2, top_p=0.5, min_p=0.1)
    assert knobs == Knobs()
    tokens, logprobs = draw(keys_of(2), logits, knobs)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, np.log([0.4, 0.7]), atol=1e-6)


def test_a_row_does_not_read_the_others() -> None:
    keys, logits = keys_of(8), jax.random.normal(jax.random.key(1), (8, 500))
    together = draw(keys, logits, knobs_of())
    for row in range(8):
        alone = draw(keys[row : row + 1], logits[row : row + 1], knobs_of())
        assert int(alone.tokens[0]) == int(together.tokens[row])
    assert len(set(together.tokens.tolist())) > 1


def test_broken_logits_report_nan_and_harm_only_their_row() -> None:
    logits = jnp.zeros((3, 4)).at[0, 1].set(jnp.nan).at[1, 2].set(jnp.inf)
    for knobs in (knobs_of(), knobs_of(0.0), knobs_of(top_p=0.5)):
        logprobs = draw(keys_of(3), logits, knobs).logprobs
        assert np.isnan(logprobs[:2]).all()
        np.testing.assert_allclose(logprobs[2], np.log(0.25), atol=1e-6)


def test_bfloat16_logits_are_drawn_from_in_float32() -> None:
    logits = jnp.array([[1.0, 2.0, 3.0]], jnp.bfloat16)
    result = draw(keys_of(1), logits, knobs_of())
    assert result.logprobs.dtype == jnp.float32
    dense = np.log(np.exp([1.0, 2.0, 3.0]) / np.exp([1.0, 2.0, 3.0]).sum())
    np.testing.assert_allclose(result.logprobs[0], dense[int(result.tokens[0])], atol=1e-6)


def test_values_of_knobs_do_not_compile_again_and_filters_that_are_off_do_not_exist() -> None:
    traces = []

    def counted(keys: jax.Array, logits: jax.Array, knobs: Knobs) -> Draw:
        traces.append(knobs)
        return draw(keys, logits, knobs)

    compiled, logits = jax.jit(counted), jnp.zeros((2, 9))
    for temperature in (0.5, 1.0, 1.5):
        compiled(keys_of(2), logits, knobs_of(temperature))
    assert len(traces) == 1
    for top_p in (0.5, 0.9):
        compiled(keys_of(2), logits, knobs_of(top_p=top_p))
    assert len(traces) == 2
    plain = jax.make_jaxpr(draw)(keys_of(2), logits, knobs_of())
    filtered = jax.make_jaxpr(draw)(keys_of(2), logits, knobs_of(top_p=0.9))
    assert " sort[" not in str(plain)
    assert " sort[" in str(filtered)
