"""Segments of a packed row: maximal runs of equal ids along the last axis.

The same id further along the row is another segment. Without ids each row is one segment.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["ends_of_segments", "last_of_each_segment", "segment_totals"]


def ends_of_segments(ids: jax.Array) -> jax.Array:
    """True at the last position of every segment, bool [..., T]."""
    changes = ids[..., 1:] != ids[..., :-1]
    return jnp.concatenate([changes, jnp.ones_like(ids[..., :1], bool)], axis=-1)


def last_of_each_segment(mask: jax.Array, ids: jax.Array | None = None) -> jax.Array:
    """True at the last True of `mask` in every segment, bool [..., T]."""
    if mask.shape[-1] == 0:
        return mask
    # Runs are numbered from left to right, so the smallest run among the later True positions is
    # the run of the next one.
    run = jnp.zeros(mask.shape, jnp.int32) if ids is None else _run_numbers(ids)
    never = mask.shape[-1]
    later = jnp.where(mask, run, never)[..., 1:]
    later = jnp.concatenate([later, jnp.full_like(run[..., :1], never)], axis=-1)
    return mask & (lax.cummin(later, axis=mask.ndim - 1, reverse=True) > run)


def segment_totals(x: jax.Array, ids: jax.Array | None = None) -> jax.Array:
    """The sum of `x` over each position's own segment, [..., T]."""
    if ids is None or x.shape[-1] == 0:
        return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)

    def row_totals(row: jax.Array, run: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, run, row.shape[0], indices_are_sorted=True)[run]

    # One row at a time, so that rows split over devices stay where they are.
    for _ in x.shape[:-1]:
        row_totals = jax.vmap(row_totals)
    return row_totals(x, _run_numbers(ids))


def _run_numbers(ids: jax.Array) -> jax.Array:
    """0, 1, 2, ... for the segments of a row, int32 [..., T]."""
    changes = ids[..., 1:] != ids[..., :-1]
    starts = jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), changes], axis=-1)
    return jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
