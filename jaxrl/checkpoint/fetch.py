"""A piece of an array on this host, wherever the array is: the one place where weights leave.

On the devices of one process each shard gives its part. If an array lies on the devices of several
processes, all of them must ask for the same pieces in the same order.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.checkpoint.boxes import Box, box_of, moved, sizes, slices
from jaxrl.sharding import replicated

__all__ = ["fetch", "unit_of"]


def fetch(leaf: Any, box: Box) -> np.ndarray:
    """A box of an array, as it is: a view where it lies on the host, and of no more than the box.

    Args:
        leaf: A numpy array, a jax array, or a `StoredArray`.
        box: Which part.
    """
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf[slices(box)])
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return _from_shards(leaf, box)
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    gather = _gatherer(replicated(sharding.mesh), sizes(box))
    return np.asarray(gather(leaf, _start(box)))


def unit_of(leaf: Any) -> tuple[int, ...] | None:
    """What an array is kept in parts of, so that pieces take whole ones; None: any part will do."""
    return getattr(leaf, "chunk", None)


def _from_shards(leaf: jax.Array, box: Box) -> np.ndarray:
    shards = {box_of(leaf.shape, shard.index): shard.data for shard in leaf.addressable_shards}
    whole = None
    for there, data in shards.items():
        common = _overlap(there, box)
        if common is None:
            continue
        # Cut out on its device. The shard itself as numpy would be a copy that lives as long as it.
        local = moved(common, [-start for start, _ in there])
        part = np.asarray(_cut(data, _start(local), sizes(local)))
        if common == box:
            return part
        whole = np.empty(sizes(box), leaf.dtype) if whole is None else whole
        whole[slices(moved(common, [-start for start, _ in box]))] = part
    assert whole is not None
    return whole


def _overlap(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _start(box: Box) -> np.ndarray:
    return np.array([start for start, _ in box], np.int32)


@partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(array, tuple(start), shape)


@cache
def _gatherer(where: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Cuts a box out of a split array and gives it to every device."""
    return jax.jit(lambda array, start: _cut(array, start, shape), out_shardings=where)
