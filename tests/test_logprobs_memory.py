"""Log-probabilities: no array of tokens times vocabulary exists, and few programs are traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl.logprobs import TiedHead, token_logprobs, token_logprobs_and_entropy
from tests.logprob_reference import (
    problem,
)

MIB = 2**20


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
