"""Attention: the plain definition, and how a decoder layer computes it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl.errors import ConfigError
from jaxrl.models.blockwise import blockwise_attention
from jaxrl.models.sight import Sight
from jaxrl.models.splash import splash_attention, splash_refusal
from jaxrl.sharding import BATCH_AXES, platform_of, row_multiple

__all__ = ["METHODS", "attention", "chosen_method", "local_attention"]

METHODS = ("auto", "dense", "blockwise", "splash")
"""What length and device ask for; scores of all pairs at once; block by block; a TPU kernel."""

# Finite, so that a query which sees nothing (padding in a cache) averages instead of making NaN.
_HIDDEN_SCORE = -1e30
_LONGEST_DENSE = 256
"""Keys up to which `auto` takes all pairs at once; on CPU blocks are faster beyond."""
_BLOCK_CPU, _BLOCK_ACCELERATOR = 128, 512
"""Queries, and keys, of a block."""


def chosen_method(method: str, mesh: Mesh | None, sight: Sight, head_dim: int) -> str:
    """What `method` comes to for these queries and keys.

    A single query never has a square of scores, so decoding is dense whatever was asked for.

    Raises:
        ConfigError: "splash" was asked for and cannot do it.
    """
    queries, keys = sight.q_segments.shape[1], sight.k_segments.shape[1]
    if queries == 1:
        return "dense"
    refusal = splash_refusal(sight, head_dim)
    if method == "splash":
        if refusal and queries == keys:
            raise ConfigError(
                f"model.attention=splash is not possible: {refusal}; take auto or blockwise"
            )
        return "blockwise" if refusal else "splash"
    if method != "auto":
        return method
    if keys <= _LONGEST_DENSE:
        return "dense"
    return "splash" if platform_of(mesh) == "tpu" and not refusal else "blockwise"


def attention(
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch key kv_heads head_dim"],
    v: Float[Array, "batch key kv_heads head_dim"],
    mask: Bool[Array, "batch query key"],
) -> Float[Array, "batch query heads head_dim"]:
    """Grouped-query attention, softmax(q·kᵀ/√head_dim)·v over the keys that the mask shows.

    Query head h reads key head h // (heads / kv_heads); keys and values are not repeated in memory.

    Args:
        q: queries, already rotated.
        k: keys, already rotated.
        v: values.
        mask: True where a query sees a key. What stands at a hidden key has weight exactly 0, as
            long as it is finite. A query that sees no key gets the mean of the values.

    Returns:
        Attended values in q's dtype; scores and softmax are float32.

    Reference: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 (grouped queries).

    >>> one = jnp.ones((1, 2, 1, 2))
    >>> causal = jnp.array([[[True, False], [True, True]]])
    >>> attention(one, one, jnp.array([[[[2.0, 4.0]], [[4.0, 8.0]]]]), causal)[0, :, 0].tolist()
    [[2.0, 4.0], [3.0, 6.0]]
    """
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * (1 / math.sqrt(head_dim)), _HIDDEN_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # Queries before head_dim, as the product gives them; asked for otherwise, a CPU turns all of v.
    out = jnp.einsum("bkgqs,bskd->bkgqd", weights, v)
    return jnp.moveaxis(out, 3, 1).reshape(q.shape)


def local_attention(
    method: str,
    mesh: Mesh | None,
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch key kv_heads head_dim"],
    v: Float[Array, "batch key kv_heads head_dim"],
    sight: Sight,
    window: Int[Array, ""],
) -> Float[Array, "batch query heads head_dim"]:
    """Attention "blockwise" or "splash", on a mesh by each device for its own rows and heads.

    Which blocks are computed is then decided by a device's own rows, and nothing is exchanged.
    """
    platform = platform_of(mesh)
    block = _BLOCK_CPU if platform == "cpu" else _BLOCK_ACCELERATOR

    def local(q: Any, k: Any, v: Any, sight: Sight, window: Any) -> jax.Array:
        if method == "splash":
            return splash_attention(q, k, v, sight, interpret=platform != "tpu")
        by_row = platform == "cpu"
        return blockwise_attention(q, k, v, sight, window, block=block, by_row=by_row)

    if mesh is None or mesh.size == 1:
        return local(q, k, v, sight, window)
    rows = BATCH_AXES if q.shape[0] % row_multiple(mesh) == 0 else None
    heads = PartitionSpec(rows, None, "tensor", None)
    seen = jax.tree.map(lambda x: PartitionSpec(rows) if jnp.ndim(x) else PartitionSpec(), sight)
    run: Any = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, seen, PartitionSpec()),
        out_specs=heads,
        check_vma=False,
    )
    return run(q, k, v, sight, window)
