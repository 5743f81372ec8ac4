"""Who sees whom in attention: the one definition that every way of computing it reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

__all__ = ["ATTENDED", "NO_SEGMENT", "Sight"]

ATTENDED = "attended"
"""Name, for `jax.checkpoint`, of what attention gives and what its backward pass needs of it."""

NO_SEGMENT = -1
"""Segment of what fills a block up: differs from all segments, padding (0) included."""


class Sight(NamedTuple):
    """A query sees the keys up to its own column that have its segment and a branch it belongs to.

    Branch 0 is shared by its segment; other branches see it and themselves. Within a window of w a
    query sees keys less than w positions back.
    """

    q_segments: Int[Array, "batch query"]
    k_segments: Int[Array, "batch key"]
    q_branches: Int[Array, "batch query"] | None = None
    k_branches: Int[Array, "batch key"] | None = None
    q_positions: Int[Array, "batch query"] | None = None
    """Only needed where some layer has a window."""
    k_positions: Int[Array, "batch key"] | None = None
    first: Int[Array, ""] | int = 0
    """Column of the first query among the keys."""

    def visible(
        self, q_start: Any, q_size: int, k_start: Any, k_size: int, window: Any = 0
    ) -> Bool[Array, "batch query key"]:
        """Which of the keys [k_start, k_start + k_size) some queries see."""

        def queries(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, q_start, q_size, 1)[:, :, None]

        def keys(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, k_start, k_size, 1)[:, None, :]

        columns = self.first + q_start + jnp.arange(q_size)
        causal = columns[None, :, None] >= (k_start + jnp.arange(k_size))[None, None, :]
        seen = causal & (queries(self.q_segments) == keys(self.k_segments))
        if self.q_branches is not None and self.k_branches is not None:
            branch = keys(self.k_branches)
            seen &= (branch == 0) | (branch == queries(self.q_branches))
        if self.q_positions is not None and self.k_positions is not None:
            distance = queries(self.q_positions) - keys(self.k_positions)
            seen &= (window == 0) | (distance < window)
        return seen

    def everything(self) -> Bool[Array, "batch query key"]:
        """`visible` of all queries and keys, without a window."""
        return self._replace(q_positions=None, k_positions=None).visible(
            0, self.q_segments.shape[1], 0, self.k_segments.shape[1]
        )

    def padded(self, queries: int, keys: int) -> Sight:
        """With so many more queries and keys at the end, which see and are seen by no real one."""

        def more(x: Any, count: int, fill: int) -> Any:
            return x if x is None else jnp.pad(x, ((0, 0), (0, count)), constant_values=fill)

        return self._replace(
            q_segments=more(self.q_segments, queries, NO_SEGMENT),
            k_segments=more(self.k_segments, keys, NO_SEGMENT),
            q_branches=more(self.q_branches, queries, 0),
            k_branches=more(self.k_branches, keys, 0),
            q_positions=more(self.q_positions, queries, 0),
            k_positions=more(self.k_positions, keys, 0),
        )

    def key_blocks(self, q_block: int, k_block: int) -> tuple[jax.Array, jax.Array]:
        """First and last-plus-one block of keys that each block of queries may see, int32.

        Segments are intervals of ids in a block, so blocks of other segments are passed over at
        both ends; what the mask hides in between is computed and weighs nothing.
        """
        low_q, high_q = _extent(self.q_segments, q_block)
        low_k, high_k = _extent(self.k_segments, k_block)
        meet = (low_k[:, None, :] <= high_q[:, :, None]) & (high_k[:, None, :] >= low_q[:, :, None])
        last_column = self.first + (jnp.arange(low_q.shape[1]) + 1) * q_block - 1
        meet = meet.any(0) & (jnp.arange(low_k.shape[1])[None] * k_block <= last_column[:, None])
        count = meet.shape[1]
        last = count - jnp.argmax(meet[:, ::-1], axis=1)
        some = meet.any(1)
        first = jnp.where(some, jnp.argmax(meet, axis=1), 0).astype(jnp.int32)
        return first, jnp.where(some, last, 0).astype(jnp.int32)


def _extent(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest id of each block [batch, blocks]."""
    blocks = segments.reshape(segments.shape[0], -1, block)
    return blocks.min(-1), blocks.max(-1)
