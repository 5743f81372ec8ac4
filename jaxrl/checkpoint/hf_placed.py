"""Weights from a Hugging Face folder into our layout: on the host, or straight onto devices.

A process reads the slices its devices hold, what several hold only once, and holds no more of it at
a time than a piece: what is large is laid out on the devices first and filled piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.checkpoint.boxes import PIECE_BYTES, Box, box_of, joined, moved, pieces, sizes, slices
from jaxrl.checkpoint.hf_stored import StoredTensor
from jaxrl.models import Weight

__all__ = ["local_boxes", "on_devices", "on_host"]


def on_host(weight: Weight, stored: Mapping[str, StoredTensor], dtype: np.dtype) -> np.ndarray:
    """All of a weight, layers stacked."""
    array = np.empty(weight.full_shape, dtype)
    for box in pieces(array.shape, _file_order(weight), PIECE_BYTES // dtype.itemsize):
        _fill(array[slices(box)], weight, stored, box)
    return array


def on_devices(
    weight: Weight, stored: Mapping[str, StoredTensor], dtype: np.dtype, sharding: NamedSharding
) -> jax.Array:
    """All of a weight where `sharding` says; each process reads what its own devices hold.

    With several processes each of them asks, for the same weights in the same order.
    """
    shape, shard = weight.full_shape, sharding.shard_shape(weight.full_shape)
    devices = _devices(weight, sharding)
    most = PIECE_BYTES // dtype.itemsize // sum(map(len, devices.values()))
    array = None
    for piece in pieces(shard, _file_order(weight), most):
        boxes = {box: moved(piece, [start for start, _ in box]) for box in devices}
        read = _read(weight, stored, dtype, list(boxes.values()))
        there = [
            jax.device_put(read[boxes[box]], device)
            for box, several in devices.items()
            for device in several
        ]
        scale = [whole // part for whole, part in zip(shape, shard, strict=True)]
        global_shape = tuple(n * by for n, by in zip(sizes(piece), scale, strict=True))
        part = jax.make_array_from_single_device_arrays(global_shape, sharding, there)
        if sizes(piece) == shard:
            return part
        if array is None:
            zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
            array = zeros(shape, dtype)
        start = np.array([start for start, _ in piece], np.int32)
        # Waits: what was read would else heap up on the host.
        array = jax.block_until_ready(_writer(sharding)(array, part, start))
    assert array is not None
    return array


def local_boxes(weight: Weight, sharding: NamedSharding) -> list[Box]:
    """What the devices of this process hold of a weight, each box once."""
    return list(_devices(weight, sharding))


def _file_order(weight: Weight) -> tuple[int, ...]:
    """Our axes from the outermost to the innermost of the file, layers before all."""
    ours = tuple(weight.order.index(axis) for axis in range(len(weight.split)))
    return (0, *(axis + 1 for axis in ours)) if weight.stacked else ours


def _devices(weight: Weight, sharding: NamedSharding) -> dict[Box, list[Any]]:
    """The devices of this process by the box they hold."""
    found: dict[Box, list[Any]] = {}
    where = sharding.addressable_devices_indices_map(weight.full_shape)
    for device, index in where.items():
        found.setdefault(box_of(weight.full_shape, index), []).append(device)
    return found


def _read(
    weight: Weight, stored: Mapping[str, StoredTensor], dtype: np.dtype, boxes: Sequence[Box]
) -> dict[Box, np.ndarray]:
    """Each box; those that lie side by side are read together, in longer stretches."""
    around = joined(boxes)
    regions = [around] if around else list(boxes)
    read: dict[Box, np.ndarray] = {}
    for region in regions:
        array = np.empty(sizes(region), dtype)
        _fill(array, weight, stored, region)
        for box in boxes if around else [region]:
            read[box] = array[slices(moved(box, [-start for start, _ in region]))]
    return read


def _fill(target: np.ndarray, weight: Weight, stored: Mapping[str, StoredTensor], box: Box) -> None:
    """Reads a box of our array into `target`, converting its type on the way."""
    layers, inner = (range(*box[0]), box[1:]) if weight.stacked else (range(1), box)
    split = tuple(inner[weight.order.index(axis)] for axis in range(len(inner)))
    names = weight.hf_names()
    for number, layer in enumerate(layers):
        tensor = stored[names[layer]].read(weight.split, split)
        (target[number] if weight.stacked else target)[...] = tensor.transpose(weight.order)


@cache
def _writer(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """Writes a piece into each device's shard, in place; `start` is the same in all of them."""
    spec = sharding.spec

    @partial(jax.jit, donate_argnums=0)
    @partial(
        jax.shard_map,
        mesh=sharding.mesh,
        in_specs=(spec, spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    def write(shard: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(shard, piece, tuple(start))

    return write
