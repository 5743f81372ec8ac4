"""Attention by the TPU kernel that JAX brings ("splash"), for what that kernel can express.

It knows segments and a causal mask that is the same in every row. Branches (shared prompts),
windows that differ by layer, and caches are left to `blockwise_attention`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float

from jaxrl.models.sight import ATTENDED, Sight

__all__ = ["splash_attention", "splash_refusal"]

_LANES = 128
_BLOCK = 512


def splash_refusal(sight: Sight, head_dim: int) -> str | None:
    """Why the kernel cannot compute this attention; None: it can."""
    queries, keys = sight.q_segments.shape[1], sight.k_segments.shape[1]
    if sight.q_branches is not None:
        return "packing.share_prompts=true"
    if sight.q_positions is not None:
        return "the model has sliding windows"
    if queries != keys or queries % _LANES:
        return f"rows of {queries} tokens; they must be a multiple of {_LANES}, without a cache"
    if head_dim % _LANES:
        return f"heads of {head_dim} features; they must be a multiple of {_LANES}"
    return None


def splash_attention(
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch query kv_heads head_dim"],
    v: Float[Array, "batch query kv_heads head_dim"],
    sight: Sight,
    *,
    interpret: bool = False,
) -> Float[Array, "batch query heads head_dim"]:
    """`blockwise_attention` where `splash_refusal` finds nothing; `interpret` runs on any backend.

    Memory is linear in the length, forward and back; scores and softmax are float32.
    """
    length = q.shape[1]
    block = next(size for size in (_BLOCK, 256, _LANES) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * q.shape[2])
    kernel = splash.make_splash_mha_single_device(
        mask, block_sizes=sizes, interpret=interpret, residual_checkpoint_name=ATTENDED
    )

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        by_head = partial(jnp.moveaxis, source=1, destination=0)
        ids = splash.SegmentIds(q=segments, kv=segments)
        out: Any = kernel(by_head(q), by_head(k), by_head(v), segment_ids=ids)
        return jnp.moveaxis(out, 0, 1)

    scaled = q * jnp.asarray(1 / math.sqrt(q.shape[-1]), q.dtype)
    return jax.vmap(row)(scaled, k, v, sight.q_segments)
