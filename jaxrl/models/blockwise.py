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
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.models.sight import ATTENDED, Sight

__all__ = ["blockwise_attention"]

_LOWEST = float(jnp.finfo(jnp.float32).min)
_FLOOR = -1e30
"""Where a running maximum starts: exp(_LOWEST - _FLOOR) is exactly 0, so a hidden key weighs 0."""


def blockwise_attention(
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch key kv_heads head_dim"],
    v: Float[Array, "batch key kv_heads head_dim"],
    sight: Sight,
    window: Int[Array, ""] | int = 0,
    *,
    block: int = 256,
    by_row: bool = False,
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
        by_row: one row of the batch after the other, so that a block of scores stays in a CPU's
            cache and each row passes over the blocks it does not need; else all rows together.

    Returns:
        Attended values in q's dtype; scores and softmax are float32. A query that sees no key
        gets 0.
    """
    (batch, queries), keys, kv_heads = q.shape[:2], k.shape[1], k.shape[2]
    sizes = min(block, queries), min(block, keys)
    sight = sight.padded(-queries % sizes[0], -keys % sizes[1])
    runs = batch if by_row else 1
    cut = partial(_cut, runs=runs, kv_heads=kv_heads)
    sight = jax.tree.map(lambda x: x.reshape(runs, -1, x.shape[1]) if jnp.ndim(x) else x, sight)
    window = jnp.asarray(window, jnp.int32)
    q, k, v = cut(q, sizes[0]), cut(k, sizes[1]), cut(v, sizes[1])
    out: jax.Array = _attend(sizes, q, k, v, sight, window)
    return _joined(out, sizes[0])[:, :queries]


def _cut(x: jax.Array, block: int, *, runs: int, kv_heads: int) -> jax.Array:
    """[B, T, heads, head_dim] to [runs, blocks, B / runs, kv_heads, groups x block, head_dim].

    A block of one run is then one piece of memory, in the order that the products want.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    batch, length, heads, size = x.shape
    x = x.reshape(runs, batch // runs, length // block, block, kv_heads, heads // kv_heads, size)
    x = x.transpose(0, 2, 1, 4, 5, 3, 6)
    return x.reshape(*x.shape[:4], -1, size)


def _joined(x: jax.Array, block: int) -> jax.Array:
    """The inverse of `_cut`, padding included."""
    runs, blocks, rows, kv_heads, together, size = x.shape
    x = x.reshape(runs, blocks, rows, kv_heads, together // block, block, size)
    x = x.transpose(0, 2, 1, 5, 3, 4, 6)
    return x.reshape(runs * rows, blocks * block, -1, size)


class _Run(NamedTuple):
    """The rows that are computed together: arrays by block, who sees whom, and block sizes."""

    q: jax.Array  # [blocks, b, kv_heads, n, head_dim]; n: groups x queries of a block
    k: jax.Array  # [blocks, b, kv_heads, keys of a block, head_dim]
    v: jax.Array
    sight: Sight
    window: jax.Array
    sizes: tuple[int, int]

    def scores(self, q: jax.Array, i: Any, j: Any) -> jax.Array:
        """Scaled scores [b, kv_heads, n, keys] of a pair of blocks; _LOWEST where hidden."""
        scores = _product("bhnd,bhkd->bhnk", q, self.k[j]) * (1 / math.sqrt(q.shape[-1]))
        q_size, k_size = self.sizes
        seen = self.sight.visible(i * q_size, q_size, j * k_size, k_size, self.window)
        by_group = scores.reshape(*scores.shape[:2], -1, q_size, k_size)
        return jnp.where(seen[:, None, None], by_group, _LOWEST).reshape(scores.shape)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _forward(run: _Run) -> tuple[jax.Array, jax.Array]:
    """Attended values like q, and the log-sum-exp of each query's scores."""
    first, last = run.sight.key_blocks(*run.sizes)

    def one(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = run.q[i]

        def absorb(j: jax.Array, sums: Any) -> Any:
            top, total, out = sums
            scores = run.scores(q, i, j)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            more = _product("bhnk,bhkd->bhnd", weights.astype(q.dtype), run.v[j])
            return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + more

        shape = q.shape[:-1]
        empty = (jnp.full(shape, _FLOOR), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
        top, total, out = lax.fori_loop(first[i], last[i], absorb, empty)
        total = jnp.where(total > 0, total, 1.0)
        return (out / total[..., None]).astype(q.dtype), top + jnp.log(total)

    return lax.map(one, jnp.arange(len(run.q)))


def _each_run(
    function: Any, sizes: tuple[int, int], sight: Sight, window: jax.Array, *arrays: jax.Array
) -> Any:
    """`function(run, *others)` for one run after the other; arrays q, k, v, *others."""
    columns, first = sight._replace(first=None), sight.first  # type: ignore[arg-type]

    def one(each: Any) -> Any:
        (q, k, v, *others), columns = each
        return function(_Run(q, k, v, columns._replace(first=first), window, sizes), *others)

    return lax.map(one, (arrays, columns))


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
    out, lse = _each_run(_forward, sizes, sight, window, q, k, v)
    # Under jax.checkpoint a policy may keep these two, and the loops above are not run again.
    out, lse = (checkpoint_name(x, ATTENDED) for x in (out, lse))
    return out, (q, k, v, sight, window, out, lse)


def _backward(sizes: tuple[int, int], saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, sight, window, out, lse = saved
    pull = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    grads = _each_run(_gradients, sizes, sight, window, q, k, v, lse, pull, d_out)
    return *grads, None, None


def _gradients(run: _Run, *by_query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v; by_query: log-sum-exps, Σ_d out · d_out, and d_out."""
    first, last = run.sight.key_blocks(*run.sizes)

    def over_queries(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        here = run.q[i], *(x[i] for x in by_query)

        def over_keys(j: jax.Array, inner: Any) -> Any:
            d_q, d_k, d_v = inner
            part_q, part_k, part_v = _pair(run, here, i, j)
            return d_q + part_q, d_k.at[j].add(part_k), d_v.at[j].add(part_v)

        zero = jnp.zeros(here[0].shape, jnp.float32)
        d_q, *carry = lax.fori_loop(first[i], last[i], over_keys, (zero, *carry))
        return tuple(carry), d_q.astype(run.q.dtype)

    # Summed with head_dim before the keys: the product then turns a block of q, not of scores.
    zeros = jnp.zeros(run.k.swapaxes(-1, -2).shape, jnp.float32)
    (d_k, d_v), d_q = lax.scan(over_queries, (zeros, zeros), jnp.arange(len(run.q)))
    turned = (x.swapaxes(-1, -2).astype(run.k.dtype) for x in (d_k, d_v))
    return d_q, *turned


def _pair(
    run: _Run, here: tuple[jax.Array, ...], i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What one pair of blocks adds to the gradients of its queries, keys and values, float32."""
    q, lse, pull, d_out = here
    weights = jnp.exp(run.scores(q, i, j) - lse[..., None])
    d_weights = _product("bhnd,bhkd->bhnk", d_out, run.v[j])
    d_scores = weights * (d_weights - pull[..., None])
    d_scores = (d_scores * (1 / math.sqrt(q.shape[-1]))).astype(q.dtype)
    return (
        _product("bhnk,bhkd->bhnd", d_scores, run.k[j]),
        _product("bhnd,bhnk->bhdk", q, d_scores),
        _product("bhnd,bhnk->bhdk", d_out, weights.astype(q.dtype)),
    )


_attend.defvjp(_save, _backward)
