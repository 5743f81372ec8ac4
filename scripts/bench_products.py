"""The matrix products that a measured step consists of, and nothing else: what they take alone.

A step is held against the products that it makes itself, recomputed ones included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench_inputs import Sizes
from bench_timing import Work
from jax import lax

__all__ = ["critic_step", "head", "policy_step", "sampler"]

_BLOCK = 128  # of blockwise attention on a CPU


class Product(NamedTuple):
    """`batch` products [m, k] x [k, n], made `times` times."""

    times: int
    m: int
    k: int
    n: int
    batch: int = 1
    turned: str = ""
    """"left": the left one lies as [k, m]; "right": the right one as [n, k]."""


def _layer(sizes: Sizes) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's seven projections; the last two go back to its width."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    wide = [(sizes.hidden, n) for n in (queries, keys, keys, sizes.inner, sizes.inner)]
    return [*wide, (queries, sizes.hidden), (sizes.inner, sizes.hidden)]


def _trunk(sizes: Sizes) -> Iterator[Product]:
    """Forward and backward of the layers, each recomputed but for attention and what ends it."""
    tokens, layers = sizes.rows * (sizes.prompt + sizes.response), sizes.layers
    projections = _layer(sizes)
    for k, n in projections + projections[:-1]:
        yield Product(layers, tokens, k, n)
    for k, n in projections:
        yield Product(layers, tokens, n, k, turned="right")
        yield Product(layers, k, tokens, n, turned="left")
    # Two products of attention forward, five back, of the blocks on and below the diagonal.
    blocks = -(-(sizes.prompt + sizes.response) // _BLOCK)
    pairs = layers * sizes.rows * blocks * (blocks + 1) // 2
    queries, heads = _BLOCK * sizes.heads // sizes.kv_heads, sizes.kv_heads
    yield Product(3 * pairs, queries, sizes.head_dim, _BLOCK, heads, "right")
    yield Product(2 * pairs, queries, _BLOCK, sizes.head_dim, heads)
    yield Product(2 * pairs, sizes.head_dim, queries, _BLOCK, heads, "left")


def _work(products: list[Product], tokens: int) -> Work:
    """All of them, one after the other; each kind is one compiled program."""
    programs = []
    for product in products:
        left, right = (product.m, product.k), (product.k, product.n)
        axes = (1, 0)
        if product.turned == "left":
            left, axes = left[::-1], (0, 0)
        elif product.turned == "right":
            right, axes = right[::-1], (1, 1)
        numbers: Any = (((axes[0],), (axes[1],)), ((), ()))
        if product.batch > 1:
            left, right = (product.batch, *left), (product.batch, *right)
            numbers = (((axes[0] + 1,), (axes[1] + 1,)), ((0,), (0,)))
        arrays = jnp.ones(left, jnp.float32), jnp.ones(right, jnp.float32)
        function = jax.jit(lambda a, b, by=numbers: lax.dot_general(a, b, by))
        programs.append((product.times, function.lower(*arrays).compile(), arrays))

    def call() -> Any:
        for times, program, arrays in programs:
            for _ in range(times):
                result = jax.block_until_ready(program(*arrays))
        return result

    flops = sum(2 * p.times * p.batch * p.m * p.k * p.n for p in products)
    return Work(call, 0, lambda _: {"gigaflop": flops / 1e9}, tokens)


def head(sizes: Sizes) -> Work:
    """The one product hidden @ head, in blocks: a forward pass has one, a gradient four of them.

    Blocks, because a result of tokens x vocabulary would not fit.
    """
    tokens, width = sizes.rows * (sizes.prompt + sizes.response), min(1024, sizes.vocab)
    hidden = jnp.ones((tokens, sizes.hidden), jnp.float32)
    matrix = jnp.ones((sizes.hidden, sizes.vocab), jnp.float32)

    def largest(flat: jax.Array, matrix: jax.Array) -> jax.Array:
        def block(i: jax.Array) -> jax.Array:
            return (flat @ lax.dynamic_slice_in_dim(matrix, i * width, width, 1)).max()

        return lax.map(block, jnp.arange(sizes.vocab // width)).max()

    program = jax.jit(largest).lower(hidden, matrix).compile()
    flops = 2 * tokens * sizes.hidden * sizes.vocab
    return Work(lambda: program(hidden, matrix), 0, lambda _: {"gigaflop": flops / 1e9}, tokens)


def critic_step(sizes: Sizes) -> Work:
    """Of a critic with its own trunk."""
    return _work(list(_trunk(sizes)), sizes.rows * (sizes.prompt + sizes.response))


def policy_step(sizes: Sizes) -> Work:
    """Of the policy: the trunk, and the head at response tokens, its logits made twice."""
    tokens, block = sizes.rows * sizes.response, min(1024, sizes.vocab)
    chunks, blocks = -(-tokens // 1024), -(-sizes.vocab // block)
    rows = tokens // chunks
    products = [
        Product(2 * chunks * blocks, rows, sizes.hidden, block),
        Product(chunks * blocks, rows, block, sizes.hidden, turned="right"),
        Product(chunks * blocks, sizes.hidden, rows, block, turned="left"),
    ]
    return _work([*_trunk(sizes), *products], sizes.rows * (sizes.prompt + sizes.response))


def sampler(sizes: Sizes) -> Work:
    """Of prefill and decoding: projections, the head once a token, and attention to the cache."""
    rows, length, new = sizes.sampled_rows, sizes.sampled_prompt, sizes.sampled_new
    steps = new - 1
    products = [Product(sizes.layers, rows * length, k, n) for k, n in _layer(sizes)]
    products += [Product(sizes.layers * steps, rows, k, n) for k, n in _layer(sizes)]
    products.append(Product(new, sizes.vocab, sizes.hidden, rows, turned="right"))
    batch, group = rows * sizes.kv_heads, sizes.heads // sizes.kv_heads
    columns = length + steps
    times = sizes.layers * steps
    products.append(Product(times, group, sizes.head_dim, columns, batch, "right"))
    products.append(Product(times, group, columns, sizes.head_dim, batch))
    return _work(products, rows * new)
