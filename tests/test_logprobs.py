"""Per-token log-probabilities: hand values, a slow float64 reference, chunks, refusals."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import vocab_blocks
from jaxrl.logprobs import TiedHead, token_logprobs, token_logprobs_and_entropy
from tests.logprob_reference import (
    assert_close,
    dense_13,
    evaluate,
    gradients,
    outputs_and_gradients,
    problem,
    reference,
    use_small_blocks,
)

CASES = json.loads((Path(__file__).parent / "data" / "logprob_cases.json").read_text())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


# ---- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 1024])
def test_lp_01_target_is_scored_by_the_row_that_predicts_it(chunk_size: int | None) -> None:
    # Rows of logits at positions 0..2 of ids [0, 2, 1]; token 2 is predicted by row 0: e^z is
    # 1, 1, 2, so ln(2/4); token 1 by row 1: e^z is 3, 1, 1, so ln(1/5).
    ids = jnp.array([0, 2, 1])
    rows = jnp.array([[0, 0, math.log(2)], [math.log(3), 0, 0], [0, 0, 0]])
    got = token_logprobs(rows[:-1], jnp.eye(3), ids[1:], chunk_size=chunk_size)
    assert_close(got, [-0.693147, -1.609438], 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1024])
def test_lp_04_entropy_is_that_of_the_tempered_distribution(chunk_size: int | None) -> None:
    # Logits [2, 0] at temperature 0.5 are [4, 0]: p = 1 / (1 + e^-4) = 0.982014.
    logprobs, entropy = token_logprobs_and_entropy(
        jnp.array([[2.0, 0.0]]), jnp.eye(2), jnp.array([0]), temperature=0.5, chunk_size=chunk_size
    )
    assert_close(entropy, [0.0900948], 1e-6)
    assert_close(logprobs, [math.log(0.98201379)], 1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_values_of_other_libraries(case: dict[str, Any], chunk_size: int | None) -> None:
    logits = jnp.asarray(case["logits"], jnp.float32)
    targets = jnp.asarray(case["targets"])
    settings = {"temperature": case["temperature"], "chunk_size": chunk_size}

    def scores(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out = token_logprobs_and_entropy(x, jnp.eye(x.shape[-1]), targets, **settings)
        return out[0].sum(), out

    slope, (logprobs, entropy) = jax.jit(jax.grad(scores, has_aux=True))(logits)
    assert_close(logprobs, case["logprobs"], 2e-6)
    if "entropy" in case:
        assert_close(entropy, case["entropy"], 2e-6)
    if "grad_logits_of_sum" in case:
        assert_close(slope, case["grad_logits_of_sum"], 2e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    "heat, with_bias, softcap",
    [
        ("none", False, None),
        ("number", False, None),
        ("none", True, 1.5),
        ("row", True, None),
        ("token", False, 1.5),
        ("token", True, 1.5),
    ],
)
def test_slow_reference(
    heat: str, with_bias: bool, softcap: float | None, chunk_size: int | None
) -> None:
    given = problem(2, 7)
    per_token = given["temperature"]
    temperature = {"none": 1.0, "number": 0.7, "row": per_token[:, :1], "token": per_token}[heat]
    given["temperature"] = temperature
    want = reference(**{**given, "bias": given["bias"] if with_bias else 0.0}, softcap=softcap)
    if not with_bias:
        given["bias"] = None
    assert_close(evaluate(given, softcap=softcap, chunk_size=chunk_size), want, 1e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("lead", [(5,), (2, 3, 5)])
def test_any_leading_dimensions(lead: tuple[int, ...]) -> None:
    given = problem(*lead)
    want = reference(**given)
    assert_close(evaluate(given, chunk_size=2), want, 1e-6)
    only = token_logprobs(  # outside jit
        given["hidden"], given["head"], given["targets"], chunk_size=2,
        temperature=given["temperature"], bias=given["bias"],
    )  # fmt: skip
    assert only.dtype == jnp.float32
    assert_close(only, want[0], 1e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_tied_head_equals_transposed_embedding(chunk_size: int | None) -> None:
    given = problem(2, 7)
    embedding = given["head"].T
    plain = {**given, "head": embedding.T}
    tied = {**given, "head": TiedHead(embedding)}
    outputs, got = outputs_and_gradients(tied, chunk_size=chunk_size)
    assert_close(outputs, reference(**plain), 1e-6)
    want = gradients(plain, chunk_size=None)
    assert got["head"].embedding.shape == embedding.shape
    assert_close({**got, "head": got["head"].embedding.T}, want, 1e-5)


@pytest.mark.parametrize("chunk_size", [None, 1024])
def test_far_apart_logits_stay_exact(chunk_size: int | None) -> None:
    # One logit ahead by 1e4: certain, entropy 0; the other target has log p = -1e4.
    hidden = jnp.array([[1e4, 0.0], [1e4, 0.0]])
    logprobs, entropy = token_logprobs_and_entropy(
        hidden, jnp.eye(2), jnp.array([0, 1]), chunk_size=chunk_size
    )
    np.testing.assert_array_equal(logprobs, [0.0, -1e4])
    np.testing.assert_array_equal(entropy, [0.0, 0.0])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 1024])
def test_equal_logits_have_the_largest_entropy(chunk_size: int | None) -> None:
    logprobs, entropy = token_logprobs_and_entropy(
        jnp.zeros((3, 4)), jnp.ones((4, 50)), jnp.array([0, 31, 49]), chunk_size=chunk_size
    )
    assert_close(logprobs, [-math.log(50)] * 3, 1e-6)
    assert_close(entropy, [math.log(50)] * 3, 1e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_bias_of_minus_infinity_bans_a_token(chunk_size: int | None) -> None:
    given = problem(2, 5, vocab=60)
    given["targets"] = given["targets"] % 20 + 40
    given["bias"] = given["bias"].at[:40].set(-jnp.inf)  # the whole first block of 32, and more
    left = {**given, "head": given["head"][:, 40:], "bias": given["bias"][40:]}
    want = reference(**{**left, "targets": given["targets"] - 40})
    outputs, slopes = outputs_and_gradients(given, chunk_size=chunk_size)
    assert_close(outputs, want, 1e-6)
    assert all(bool(jnp.isfinite(x).all()) for x in slopes.values())
    np.testing.assert_array_equal(slopes["head"][:, :40], 0.0)
    np.testing.assert_array_equal(slopes["bias"][:40], 0.0)


# ---- chunks ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "chunk_size, softcap", [(1, 2.0), (7, 2.0), (7, None), (12, 2.0), (13, 2.0), (18, 2.0)]
)
def test_chunk_sizes_agree_with_one_piece(chunk_size: int, softcap: float | None) -> None:
    given, (whole, whole_slopes) = dense_13(softcap)
    plan = vocab_blocks.block_plan(
        2, 13, 75, chunk_size=chunk_size, softcap=None, entropy=True
    )  # the blocks under test are the ones meant
    assert plan.positions == min(chunk_size, 13)
    assert plan.vocab < 75 or chunk_size == 1
    outputs, slopes = outputs_and_gradients(given, softcap=softcap, chunk_size=chunk_size)
    assert_close(outputs, whole, 1e-6)
    assert_close(slopes, whole_slopes, 1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("length", range(1, 10))
def test_lp_08_no_position_is_lost(length: int) -> None:
    given = problem(2, length, vocab=11)
    hidden, head, targets = (given[name] for name in ("hidden", "head", "targets"))
    want = reference(hidden, head, targets)[0]
    sizes = range(1, 11)
    scores = jax.jit(lambda h: [token_logprobs(h, head, targets, chunk_size=n) for n in sizes])
    for got in scores(hidden):
        assert got.shape == (2, length)
        assert_close(got, want, 1e-6)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)])
def test_lp_08_nothing_to_score(chunk_size: int | None, lead: tuple[int, ...]) -> None:
    given = problem(*lead)
    logprobs, entropy = evaluate(given, chunk_size=chunk_size)
    assert logprobs.shape == entropy.shape == lead
    slopes = gradients(given, chunk_size=chunk_size)
    assert slopes["hidden"].shape == (*lead, 6)
    np.testing.assert_array_equal(slopes["head"], 0.0)


def test_default_chunk_size_and_the_widths_of_real_vocabularies() -> None:
    # 3 columns more than a whole number of blocks: the ragged block is scored too.
    given = problem(2, 600, vocab=2 * 1024 + 3, width=4)
    given["targets"] = given["targets"].at[:, :3].set(jnp.arange(2048, 2051))
    plan = vocab_blocks.block_plan(2, 600, 2051, chunk_size=1024, softcap=None, entropy=True)
    assert (plan.positions, plan.vocab) == (512, 1024)
    outputs, slopes = outputs_and_gradients(given)
    whole, whole_slopes = outputs_and_gradients(given, chunk_size=None)
    assert_close(outputs, whole, 1e-6)
    assert_close(slopes, whole_slopes, 1e-5)


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"chunk_size": 0}, ValueError, "chunk_size is 0; expected an integer >= 1"),
        ({"chunk_size": -3}, ValueError, "chunk_size is -3"),
        ({"chunk_size": 2.0}, ValueError, "chunk_size is 2.0"),
        ({"chunk_size": True}, ValueError, "chunk_size is True"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; expected a number > 0"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
        ({"softcap": math.nan}, ValueError, "softcap is nan"),
        ({"temperature": 0.0}, ValueError, "temperature is 0.0; expected > 0"),
        ({"temperature": -1}, ValueError, "temperature is -1"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"temperature": np.array([[1.0], [0.0]])}, ValueError, "expected > 0"),
        ({"temperature": np.ones(3)}, ValueError, r"temperature has shape \(3,\)"),
        ({"temperature": np.ones((1, 2, 7))}, ValueError, r"temperature has shape \(1, 2, 7\)"),
        ({"hidden": np.ones(6, np.float32)}, ValueError, r"hidden has shape \(6,\)"),
        ({"head": np.ones((5, 41), np.float32)}, ValueError, r"head has shape \(5, 41\).*D=6"),
        ({"head": np.ones((6, 0), np.float32)}, ValueError, r"head has shape \(6, 0\)"),
        ({"head": np.ones(6, np.float32)}, ValueError, r"head has shape \(6,\)"),
        ({"head": TiedHead(np.ones((6, 41), np.float32))}, ValueError, r"expected \[V, D\]"),
        ({"targets": np.zeros((2, 6), int)}, ValueError, r"targets has shape \(2, 6\).*\(2, 7\)"),
        ({"bias": np.ones(40, np.float32)}, ValueError, r"bias has shape \(40,\).*\(41,\)"),
        ({"mask": np.ones((2, 1), bool)}, ValueError, r"mask has shape \(2, 1\).*\(2, 7\)"),
        ({"mask": np.ones((2, 7), np.float32)}, TypeError, "mask has dtype float32"),
        ({"targets": np.zeros((2, 7), np.float32)}, TypeError, "targets has dtype float32"),
        ({"targets": np.zeros((2, 7), bool)}, TypeError, "targets has dtype bool"),
        ({"hidden": np.ones((2, 7, 6), np.int32)}, TypeError, "hidden has dtype int32"),
        ({"head": np.ones((6, 41), np.int32)}, TypeError, "head has dtype int32"),
        ({"bias": np.ones(41, np.int32)}, TypeError, "bias has dtype int32"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_errors_name_the_argument_and_what_fits(
    changes: dict[str, Any], error: type[Exception], words: str, both: bool
) -> None:
    given = {**problem(2, 7), **changes}
    positional = [given.pop(name) for name in ("hidden", "head", "targets")]
    with pytest.raises(error, match=words):
        (token_logprobs_and_entropy if both else token_logprobs)(*positional, **given)


def test_temperature_at_masked_positions_is_not_judged() -> None:
    given = problem(2, 7)
    mask = np.ones((2, 7), bool)
    mask[0, 3] = False
    zero = np.where(mask, given["temperature"], 0.0)
    got = token_logprobs(
        given["hidden"], given["head"], given["targets"], temperature=zero, bias=given["bias"],
        mask=mask,
    )  # fmt: skip
    assert_close(got, np.where(mask, reference(**given)[0], 0.0), 1e-6)
    with pytest.raises(ValueError, match="every valid position"):
        token_logprobs(given["hidden"], given["head"], given["targets"], temperature=zero)


def test_arguments_after_targets_are_keyword_only() -> None:
    given = problem(2, 7)
    for function, last in itertools.product(
        (token_logprobs, token_logprobs_and_entropy), (4, None)
    ):
        with pytest.raises(TypeError):
            function(given["hidden"], given["head"], given["targets"], last)
