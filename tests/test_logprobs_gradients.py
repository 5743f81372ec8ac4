"""Log-probabilities: gradients, float types, masks, and one answer under every transformation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.logprobs import PlacedHead, TiedHead, token_logprobs, token_logprobs_and_entropy
from tests.logprob_reference import (
    FLOATS,
    assert_close,
    evaluate,
    gradients,
    outputs_and_gradients,
    problem,
    reference,
    use_small_blocks,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


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


@pytest.mark.parametrize("chunk_size", [7, 3])
def test_a_tied_head_in_bfloat16_has_the_gradient_of_its_transpose(chunk_size: int) -> None:
    given = problem(2, 7, width=64, vocab=96)
    hidden, targets = given["hidden"].astype(jnp.bfloat16), given["targets"]
    embedding = given["head"].T

    def total(h: jax.Array, w: jax.Array, wrap: Any) -> jax.Array:
        head = PlacedHead(wrap(w), jnp.dtype("bfloat16"), None, None)
        return token_logprobs(h, head, targets, chunk_size=chunk_size).sum()

    gradient = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
    tied, plain = gradient(hidden, embedding, TiedHead), gradient(hidden, embedding.T, jnp.asarray)
    np.testing.assert_array_equal(tied[0], plain[0])
    np.testing.assert_array_equal(tied[1], plain[1].T)


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
