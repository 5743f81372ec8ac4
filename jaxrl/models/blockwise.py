"""Attention over blocks of queries and keys: no array of queries x keys exists, forward or back.

The forward pass walks over blocks of queries and, for each, over the blocks of keys that any of
them can see, with a running softmax. The backward pass makes the same blocks of scores again from
one saved log-sum-exp a query:

    p = exp(s − lse),    ds = p (dp − Σ_d out · dout),    s = q · kᵀ / √head_dim

Blocks after the diagonal and blocks of other segments are never computed.

Reference: Milakov and Gimelshein 2018, algorithm 3 (running softmax); Dao et al. 2022,
"FlashAttention", algorithms 1 and 4, here as an XLA program.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.models.sight import Sight

__all__ = ["blockwise_attention"]

_LOWEST = float(jnp.finfo(jnp.float32).min)


def blockwise_attention(
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch key kv_heads head_dim"],
    v: Float[Array, "batch key kv_heads head_dim"],
    sight: Sight,
    window: Int[Array, ""] | int = 0,
    *,
    block: int = 256,
) -> Float[Array, "batch query heads head_dim"]:
    """Grouped-query attention, as `attention` with the mask of `sight.visible`, block by block.

    Memory beside inputs and output grows with `block` times the longer of queries and keys, not
    with their product. Differentiable once, in reverse mode, with respect to q, k and v.

    Args:
        q: queries, already rotated.
        k: keys, already rotated.
        v: values; what stands at a hidden key has weight exactly 0, as long as it is finite.
        sight: who sees whom.
        window: sliding window; 0: none.
        block: queries, and keys, taken at a time.

    Returns:
        Attended values in q's dtype; scores and softmax are float32. A query that sees no key
        gets 0.
    """
    queries, keys = q.shape[1], k.shape[1]
    q_block, k_block = min(block, queries), min(block, keys)
    sight = sight.padded(-queries % q_block, -keys % k_block)
    q, k, v = _padded(q, q_block), _padded(k, k_block), _padded(v, k_block)
    out: jax.Array = _attend((q_block, k_block), q, k, v, sight, jnp.asarray(window, jnp.int32))
    return out[:, :queries]


class _Blocks(NamedTuple):
    """What both passes read: arrays by head group, who sees whom, and block sizes."""

    q: jax.Array  # [B, Q, kv_heads, groups, head_dim]
    k: jax.Array  # [B, K, kv_heads, head_dim]
    v: jax.Array
    sight: Sight
    window: jax.Array
    sizes: tuple[int, int]

    @property
    def count(self) -> int:
        """Blocks of queries."""
        return self.q.shape[1] // self.sizes[0]

    def queries(self, array: jax.Array, i: Any) -> jax.Array:
        """Block i of something that has a row a query."""
        return lax.dynamic_slice_in_dim(array, i * self.sizes[0], self.sizes[0], 1)

    def keys(self, array: jax.Array, j: Any) -> jax.Array:
        """Block j of something that has a row a key."""
        return lax.dynamic_slice_in_dim(array, j * self.sizes[1], self.sizes[1], 1)

    def scores(self, q: jax.Array, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
        """Scaled scores [B, kv_heads, groups, q, k] of a pair of blocks, and which are visible."""
        k = self.keys(self.k, j)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32)
        q_size, k_size = self.sizes
        seen = self.sight.visible(i * q_size, q_size, j * k_size, k_size, self.window)
        return scores * (1 / math.sqrt(q.shape[-1])), seen[:, None, None]


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    batch, queries, heads, size = q.shape
    return q.reshape(batch, queries, k.shape[2], heads // k.shape[2], size)


def _padded(array: jax.Array, block: int) -> jax.Array:
    missing = -array.shape[1] % block
    return jnp.pad(array, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else array


def _forward(blocks: _Blocks) -> tuple[jax.Array, jax.Array]:
    """Attended values [B, Q, kv_heads, groups, head_dim] and log-sum-exps, without head_dim."""
    first, last = blocks.sight.key_blocks(*blocks.sizes)

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = blocks.queries(blocks.q, i)
        batch, rows, heads, groups, size = q.shape

        def absorb(j: jax.Array, run: Any) -> Any:
            top, total, out = run
            scores, seen = blocks.scores(q, i, j)
            new_top = jnp.maximum(top, jnp.where(seen, scores, _LOWEST).max(-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            more = jnp.einsum(
                "bhgqk,bkhd->bhgqd",
                weights.astype(q.dtype),
                blocks.keys(blocks.v, j),
                preferred_element_type=jnp.float32,
            )
            return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + more

        shape = (batch, heads, groups, rows)
        empty = (jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, size)))
        top, total, out = lax.fori_loop(first[i], last[i], absorb, empty)
        out = out / jnp.where(total > 0, total, 1.0)[..., None]
        lse = top + jnp.log(jnp.where(total > 0, total, 1.0))
        return jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(lse, 3, 1)

    out, lse = lax.map(one, jnp.arange(blocks.count))
    return _joined(out), _joined(lse)


def _joined(stacked: jax.Array) -> jax.Array:
    """[blocks, B, q, ...] to [B, Q, ...]."""
    moved = jnp.moveaxis(stacked, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    sizes: tuple[int, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sight: Sight,
    window: jax.Array,
) -> jax.Array:
    return _save(sizes, q, k, v, sight, window)[0]


def _save(
    sizes: tuple[int, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sight: Sight,
    window: jax.Array,
) -> tuple[jax.Array, Any]:
    out, lse = _forward(_Blocks(_grouped(q, k), k, v, sight, window, sizes))
    return out.reshape(q.shape), (q, k, v, sight, window, out, lse)


def _backward(sizes: tuple[int, int], saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, sight, window, out, lse = saved
    blocks = _Blocks(_grouped(q, k), k, v, sight, window, sizes)
    d_out = d_out.reshape(out.shape)
    pull = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    first, last = sight.key_blocks(*sizes)

    def over_queries(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        here = [blocks.queries(x, i) for x in (blocks.q, lse, pull, d_out)]

        def over_keys(j: jax.Array, inner: Any) -> Any:
            d_q, d_k, d_v = inner
            part_q, part_k, part_v = _pair(blocks, here, i, j)
            start = j * sizes[1]
            return d_q + part_q, _add(d_k, part_k, start), _add(d_v, part_v, start)

        zero = jnp.zeros(here[0].shape, jnp.float32)
        d_q, *carry = lax.fori_loop(first[i], last[i], over_keys, (zero, *carry))
        return tuple(carry), d_q.astype(q.dtype)

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    (d_k, d_v), d_q = lax.scan(over_queries, zeros, jnp.arange(blocks.count))
    d_q = _joined(d_q).reshape(q.shape)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


def _pair(
    blocks: _Blocks, here: list[jax.Array], i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one pair of blocks adds to the gradients of its queries, keys and values, float32."""
    q, lse, pull, d_out = here
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores, seen = blocks.scores(q, i, j)
    weights = jnp.where(seen, jnp.exp(scores - jnp.moveaxis(lse, 1, 3)[..., None]), 0.0)
    d_weights = dot("bqhgd,bkhd->bhgqk", d_out, blocks.keys(blocks.v, j))
    d_scores = weights * (d_weights - jnp.moveaxis(pull, 1, 3)[..., None])
    d_scores = (d_scores * (1 / math.sqrt(q.shape[-1]))).astype(q.dtype)
    return (
        dot("bhgqk,bkhd->bqhgd", d_scores, blocks.keys(blocks.k, j)),
        dot("bhgqk,bqhgd->bkhd", d_scores, q),
        dot("bhgqk,bqhgd->bkhd", weights.astype(q.dtype), d_out),
    )


def _add(total: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Add `part` to the rows of `total` from `start` on, in place under jit."""
    old = lax.dynamic_slice_in_dim(total, start, part.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, 1)


_attend.defvjp(_save, _backward)
