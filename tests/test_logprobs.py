"""Per-token log-probabilities: hand values, a slow float64 reference, chunks, memory, faults."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import vocab_blocks
from jaxrl.logprobs import TiedHead, token_logprobs, token_logprobs_and_entropy

CASES = json.loads((Path(__file__).parent / "data" / "logprob_cases.json").read_text())
FLOATS = ("hidden", "head", "bias", "temperature")
MIB = 2**20


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a vocabulary of a few dozen takes several, the last one ragged."""
    monkeypatch.setattr(vocab_blocks, "_SIDE_CPU", 32)
    monkeypatch.setattr(vocab_blocks, "_SMALLEST_WIDTH", 4)


def reference(
    hidden: Any,
    head: Any,
    targets: Any,
    temperature: Any = 1.0,
    bias: Any = 0.0,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64, from the definition: p = e^z / Σ e^z, log p[y], −Σ p log p."""
    hidden, head, bias = (np.asarray(x, np.float64) for x in (hidden, head, bias))
    targets = np.asarray(targets)
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), targets.shape)
    logprobs, entropy = np.zeros(targets.shape), np.zeros(targets.shape)
    for at in np.ndindex(targets.shape):
        z = hidden[at] @ head + bias
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
        z = z / temperature[at]
        z = z - z.max()
        log_total = math.log(sum(math.exp(a) for a in z))
        logprobs[at] = z[targets[at]] - log_total
        entropy[at] = -sum(math.exp(a - log_total) * (a - log_total) for a in z)
    return logprobs, entropy


def problem(*lead: int, width: int = 6, vocab: int = 41, scale: float = 1.0) -> dict[str, Any]:
    """Random hidden, head, targets, per-token temperature and bias."""
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.standard_normal((*lead, width)) * scale, jnp.float32),
        "head": jnp.asarray(rng.standard_normal((width, vocab)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, vocab, lead)),
        "temperature": jnp.asarray(rng.uniform(0.5, 2.0, lead), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal(vocab), jnp.float32),
    }


def evaluate(given: dict[str, Any], **settings: Any) -> tuple[jax.Array, jax.Array]:
    """Compile and call the function with all that is given as arguments."""

    def call(given: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        arguments = {**given, **settings}
        positional = [arguments.pop(name) for name in ("hidden", "head", "targets")]
        return token_logprobs_and_entropy(*positional, **arguments)

    return jax.jit(call)(given)


def outputs_and_gradients(given: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    """Both outputs, and the gradients of a sum in which each output has a weight of its own."""
    rng = np.random.default_rng(9)
    weights = jnp.asarray(rng.standard_normal((2, *given["targets"].shape)), jnp.float32)

    @jax.jit
    def both(given: dict[str, Any]) -> tuple[Any, Any]:
        def scalar(floats: dict[str, Any]) -> tuple[jax.Array, Any]:
            outputs = evaluate({**given, **floats}, **settings)
            return (jnp.stack(outputs) * weights).sum(), outputs

        floats = {name: given[name] for name in FLOATS if name in given}
        slopes, outputs = jax.grad(scalar, has_aux=True)(floats)
        return outputs, slopes

    return both(given)


def gradients(given: dict[str, Any], **settings: Any) -> dict[str, jax.Array]:
    """The second of `outputs_and_gradients`."""
    return outputs_and_gradients(given, **settings)[1]


@functools.cache
def dense_13(softcap: float | None) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """A problem of two rows of 13, and its outputs and gradients in one dense piece."""
    given = problem(2, 13, vocab=75)
    return given, outputs_and_gradients(given, softcap=softcap, chunk_size=None)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Equal leaf by leaf, absolute below 1 and relative above; each leaf of `got` is an array."""
    leaves, tree = jax.tree.flatten(got)
    for a, b in zip(leaves, tree.flatten_up_to(want), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=tolerance, atol=tolerance)


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


# ---- gradients -------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_gradients_are_the_slopes_of_the_reference(chunk_size: int | None) -> None:
    given = problem(2, 4, vocab=23)
    rng = np.random.default_rng(9)
    weights = rng.standard_normal((2, 2, 4)).astype(np.float32).astype(np.float64)
    slopes = jax.device_get(gradients(given, softcap=2.0, chunk_size=chunk_size))
    given = jax.device_get(given)

    def scalar(name: str, at: tuple[int, ...], step: float) -> float:
        moved = given[name].astype(np.float64)
        moved[at] += step
        return float((np.stack(reference(**{**given, name: moved}, softcap=2.0)) * weights).sum())

    for name in FLOATS:
        for at in [tuple(rng.integers(0, n) for n in given[name].shape) for _ in range(6)]:
            want = (scalar(name, at, 1e-5) - scalar(name, at, -1e-5)) / 2e-5
            assert slopes[name][at] == pytest.approx(want, rel=1e-4, abs=1e-5), (name, at)


@pytest.mark.usefixtures("small_blocks")
def test_gradient_of_one_number_for_all_tokens() -> None:
    given = {**problem(2, 7), "temperature": jnp.float32(0.8)}
    slopes = gradients(given, chunk_size=3)
    assert slopes["temperature"].shape == ()
    assert_close(slopes, gradients(given, chunk_size=None), 1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_gradient_of_a_bfloat16_head_is_summed_in_float32() -> None:
    # 4096 equal contributions of 1/16 to one column: 256 in float32, 16 where a bfloat16 sum
    # stops growing (16 + 1/16 rounds to 16).
    tokens = 4096
    hidden = jnp.full((tokens, 1), 0.125, jnp.bfloat16)
    head = jnp.zeros((1, 2), jnp.bfloat16)
    targets = jnp.zeros(tokens, jnp.int32)
    slope = jax.grad(lambda w: token_logprobs(hidden, w, targets, chunk_size=1).sum())(head)
    assert slope.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(slope, np.float32), [[256.0, -256.0]])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", [5, 20, 40])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_lp_06_bfloat16_inputs_give_float32_logits(scale: int, chunk_size: int | None) -> None:
    given = problem(2, 13, width=64, vocab=96)
    hidden = (given["hidden"] * scale / 8).astype(jnp.bfloat16)
    head = given["head"].astype(jnp.bfloat16)
    targets = given["targets"]

    def total(h: jax.Array, w: jax.Array, size: int | None) -> jax.Array:
        return token_logprobs(h, w, targets, chunk_size=size).sum()

    def relative(a: jax.Array, b: jax.Array) -> float:
        a, b = np.float64(a), np.float64(b)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    wide = (hidden.astype(jnp.float32), head.astype(jnp.float32))
    want = token_logprobs(*wide, targets, chunk_size=None)
    assert relative(token_logprobs(hidden, head, targets, chunk_size=chunk_size), want) < 1e-3
    got = jax.grad(total, (0, 1))(hidden, head, chunk_size)
    for a, b in zip(got, jax.grad(total, (0, 1))(*wide, None), strict=True):
        assert a.dtype == jnp.bfloat16
        assert relative(a, b) < 1e-2


@pytest.mark.parametrize(
    "hidden_type, head_type",
    [
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
    ],
)
def test_any_float_types(hidden_type: Any, head_type: Any) -> None:
    given = problem(2, 5)
    given["hidden"], given["head"] = (
        given["hidden"].astype(hidden_type),
        given["head"].astype(head_type),
    )
    got, slopes = outputs_and_gradients(given)
    assert all(x.dtype == jnp.float32 for x in got)
    wide = {**given, "hidden": given["hidden"].astype(jnp.float32)}
    wide["head"] = given["head"].astype(jnp.float32)
    assert_close(got, reference(**wide), 1e-5)
    assert (slopes["hidden"].dtype, slopes["head"].dtype) == (hidden_type, head_type)
    assert_close(slopes, gradients(wide, chunk_size=None), 4e-2)


# ---- masks -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size, kind", [(None, jnp.int32), (3, jnp.bool_)])
def test_masked_positions_change_nothing(chunk_size: int | None, kind: Any) -> None:
    given = problem(2, 7)
    mask = jnp.array([[1, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).astype(bool)
    given["mask"] = mask.astype(kind)
    both = jax.jit(lambda g: outputs_and_gradients(g, softcap=3.0, chunk_size=chunk_size))
    clean = both(given)
    want = tuple(
        np.where(mask, x, 0.0)
        for x in reference(**{k: v for k, v in given.items() if k != "mask"}, softcap=3.0)
    )
    assert_close(clean[0], want, 1e-6)
    extreme = np.array([-(2**31), 2**31 - 1] * 7, np.int32).reshape(2, 7)
    for poison in (math.nan, math.inf, -math.inf, 1e30, 0.0):
        dirty = {
            **given,
            "hidden": jnp.where(mask[..., None], given["hidden"], poison),
            "targets": jnp.where(mask, given["targets"], extreme),
            "temperature": jnp.where(mask, given["temperature"], poison),
        }
        got, slopes = both(dirty)
        jax.tree.map(np.testing.assert_array_equal, (got, slopes), clean)
        for x in (*got, slopes["hidden"], slopes["temperature"]):
            np.testing.assert_array_equal(x[~np.asarray(mask)], 0.0)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_nan_at_a_valid_position_stays_visible_and_stays_there(chunk_size: int | None) -> None:
    given = problem(1, 4)
    given["hidden"] = given["hidden"].at[0, 2].set(jnp.nan)
    for x in evaluate(given, chunk_size=chunk_size):
        np.testing.assert_array_equal(jnp.isnan(x), [[False, False, True, False]])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("kind, bad", [(np.int32, [-1, 41, 2**31 - 1]), (np.int8, [-1, 41, -100])])
def test_valid_target_outside_the_vocabulary_is_nan(
    chunk_size: int | None, kind: Any, bad: list[int]
) -> None:
    given = problem(1, 5)
    given["targets"] = np.array([[0, *bad, 40]], kind)
    logprobs, entropy = evaluate(given, chunk_size=chunk_size)
    np.testing.assert_array_equal(jnp.isnan(logprobs), [[False, True, True, True, False]])
    assert bool(jnp.isfinite(entropy).all())


def test_small_unsigned_targets_in_a_large_vocabulary() -> None:
    given = problem(1, 4, vocab=300)
    given["targets"] = np.array([[0, 200, 255, 7]], np.uint8)
    assert_close(evaluate(given), reference(**given), 1e-6)


# ---- transformations -------------------------------------------------------------------------


@pytest.mark.usefixtures("small_blocks")
def test_jit_and_vmap_equal_plain_calls() -> None:
    given = problem(3, 2, 7)
    plain = {k: given[k] for k in ("head", "bias")}
    names = ("hidden", "targets", "temperature")

    def one(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return evaluate({**plain, **dict(zip(names, arrays, strict=True))}, chunk_size=3)

    want = evaluate(given, chunk_size=3)
    arrays = [given[name] for name in names]
    assert_close(jax.jit(jax.vmap(one))(*arrays), want, 1e-6)

    def total(hidden: jax.Array, *rest: jax.Array) -> jax.Array:
        return sum(x.sum() for x in one(hidden, *rest))

    slopes = jax.vmap(jax.grad(total))(*arrays)
    assert_close(slopes[1], jax.grad(total)(*(x[1] for x in arrays)), 1e-6)


@pytest.mark.parametrize(
    "tokens, entropy", [((1, 1), True), ((3, 40), True), ((4, 700), True), ((4, 700), False)]
)
def test_forward_is_the_same_to_the_bit_alone_and_inside_a_gradient(
    tokens: tuple[int, int], entropy: bool
) -> None:
    # The first update's ratio exp(new - old) is exactly 1 only if this holds.
    given = problem(*tokens, width=16, vocab=3 * 1024 + 5, scale=2.0)
    mask = jnp.asarray(np.random.default_rng(3).random(tokens) < 0.8)

    def outputs(hidden: jax.Array, head: jax.Array) -> Any:
        floats = {"temperature": 0.9, "mask": mask}
        both = token_logprobs_and_entropy if entropy else token_logprobs
        return both(hidden, head, given["targets"], **floats)

    @jax.jit
    def with_gradient(hidden: jax.Array, head: jax.Array, old: Any) -> Any:
        def loss(h: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            new = jax.checkpoint(outputs)(h, w)
            ratio = jax.tree.map(lambda a, b: jnp.exp(a - b), new, old)
            return sum(x.sum() for x in jax.tree.leaves(ratio)), new

        (_, new), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)
        return new, slopes

    old = jax.jit(outputs)(given["hidden"], given["head"])
    new, slopes = with_gradient(given["hidden"], given["head"], old)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(bool((x != 0).any()) for x in slopes)


# ---- memory ----------------------------------------------------------------------------------


def traced_numbers(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of all intermediate results, inside loops and custom gradients too."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from traced_numbers(inner)


def head_loss(
    rows: int, length: int, width: int, vocab: int, entropy: bool, chunk_size: int | None
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """A loss of hidden and head, and the shapes to compile it for (nothing is computed)."""

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        if not entropy:
            return token_logprobs(hidden, head, targets, chunk_size=chunk_size).sum()
        both = token_logprobs_and_entropy(hidden, head, targets, chunk_size=chunk_size)
        return both[0].sum() + 0.01 * both[1].sum()

    shapes = [(rows, length, width), (width, vocab)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return loss, [*arrays, jax.ShapeDtypeStruct((rows, length), jnp.int32)]


def temporary_bytes(function: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct]) -> int:
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_lp_07_gradient_keeps_no_chunk_of_logits() -> None:
    def used(chunk_size: int | None) -> int:
        loss, shapes = head_loss(1, 4096, 16, 32768, False, chunk_size)
        return temporary_bytes(jax.grad(loss, (0, 1)), shapes)

    whole = used(None)
    assert whole >= 4096 * 32768 * 4
    assert used(256) < 0.05 * whole
    assert used(1024) < 0.05 * whole


@pytest.mark.parametrize("entropy", [False, True])
def test_benchmark_head_fits_in_16_mib(entropy: bool) -> None:
    loss, shapes = head_loss(8, 512, 256, 32768, entropy, 1024)
    assert temporary_bytes(loss, shapes) < 16 * MIB
    assert temporary_bytes(jax.grad(loss, (0, 1)), shapes) < 16 * MIB


def test_tied_head_is_not_copied() -> None:
    loss, shapes = head_loss(8, 512, 256, 32768, False, 1024)
    tied = [shapes[0], jax.ShapeDtypeStruct((32768, 256), jnp.float32), shapes[2]]
    slope = jax.grad(lambda h, e, t: loss(h, TiedHead(e), t), (0, 1))
    assert temporary_bytes(slope, tied) < 16 * MIB


@pytest.mark.parametrize(
    "rows, length, vocab", [(64, 12, 32768), (1, 3, 151936), (2048, 2, 20003), (16, 512, 32771)]
)
@pytest.mark.parametrize("entropy", [False, True])
def test_nothing_of_tokens_times_vocabulary_exists(
    rows: int, length: int, vocab: int, entropy: bool
) -> None:
    loss, shapes = head_loss(rows, length, 8, vocab, entropy, 1024)
    closed = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*shapes)
    # The head and its gradient [8, V] are arguments and results; all else is a block.
    sizes = [math.prod(s) for s in traced_numbers(closed.jaxpr) if s != (8, vocab)]
    assert max(sizes) <= 2**20
    assert len(sizes) > 50
    assert temporary_bytes(jax.value_and_grad(loss, (0, 1)), shapes) < 24 * MIB


def test_dense_path_is_what_the_shape_check_would_catch() -> None:
    loss, shapes = head_loss(64, 12, 8, 32768, False, None)
    closed = jax.make_jaxpr(jax.grad(loss))(*shapes)
    assert max(math.prod(s) for s in traced_numbers(closed.jaxpr)) >= 64 * 12 * 32768


def test_one_trace_serves_all_contents() -> None:
    given = problem(2, 7)
    traces = []

    @jax.jit
    def scores(hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        traces.append(1)
        return token_logprobs(hidden, given["head"], targets, mask=mask)

    for shift in range(3):
        scores(given["hidden"] + shift, given["targets"], jnp.arange(14).reshape(2, 7) > shift)
    assert len(traces) == 1


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
