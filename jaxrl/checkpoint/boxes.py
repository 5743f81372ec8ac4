"""Boxes of an array: where they lie in its bytes, and how a large one is cut into pieces.

A box is (start, stop) of each axis. Whatever moves weights a piece at a time, from files to devices
and back, says with boxes which piece is meant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

__all__ = [
    "CHUNK_BYTES",
    "PIECE_BYTES",
    "Box",
    "box_of",
    "joined",
    "moved",
    "pieces",
    "runs",
    "sizes",
    "slices",
]

Box = tuple[tuple[int, int], ...]
PIECE_BYTES = 8 * 2**20
"""Most bytes of a piece on its way to or from devices. There are a few copies of it in its course,
and the allocator keeps what is freed; with 32 MiB it kept ten times that."""
CHUNK_BYTES = 16 * 2**20
"""Most bytes of a chunk in a checkpoint, and of a piece that is cut out of chunks: of a chunk that
is split along inner axes only short stretches are written at a time."""


def box_of(shape: Sequence[int], index: Sequence[slice] | None = None) -> Box:
    """The box of slices with step 1, or the whole array."""
    index = index or [slice(None)] * len(shape)
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def sizes(box: Box) -> tuple[int, ...]:
    """Its shape."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """As an index."""
    return tuple(slice(start, stop) for start, stop in box)


def moved(box: Box, by: Sequence[int]) -> Box:
    """The box further along each axis; e.g. of a shard, in the whole array."""
    return tuple((start + d, stop + d) for (start, stop), d in zip(box, by, strict=True))


def joined(boxes: Sequence[Box]) -> Box | None:
    """The box that these disjoint boxes fill exactly, or None if there is none."""
    ends = [(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True)]
    around = tuple(ends)
    filled = sum(math.prod(sizes(box)) for box in boxes)
    return around if math.prod(sizes(around)) == filled else None


def runs(shape: Sequence[int], box: Box) -> tuple[np.ndarray, int]:
    """Stretches of a row-major array that make up a box, in order.

    Args:
        shape: Of the array.
        box: A part of it.

    Returns:
        Where each stretch begins, and how long all are; both in elements.

    >>> runs((4, 10), ((1, 3), (2, 5)))
    (array([12, 22]), 3)
    >>> runs((4, 10), ((1, 3), (0, 10)))
    (array([10]), 20)
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    inner, length = len(shape), 1
    while inner:  # a stretch goes on over an axis as long as all axes inside it are whole
        inner -= 1
        length *= box[inner][1] - box[inner][0]
        if box[inner] != (0, shape[inner]):
            break
    begins = np.array([sum(start * s for (start, _), s in zip(box, strides, strict=True))])
    for (start, stop), stride in zip(box[:inner], strides[:inner], strict=True):
        begins = (begins[:, None] + np.arange(stop - start)[None] * stride).reshape(-1)
    return begins, length


def pieces(
    shape: Sequence[int], order: Sequence[int], most: int, unit: Sequence[int] | None = None
) -> Iterator[Box]:
    """Cut an array into boxes of at most `most` elements, or of one unit where that is more.

    Args:
        shape: Of the array.
        order: Its axes, the outermost of the file first. Boxes are whole along the inner ones, so
            that they are few and long stretches there.
        most: Elements of a box.
        unit: Boxes begin at multiples of it; e.g. the chunks in which the array is stored.

    Yields:
        Boxes that cover the array once, of one shape but for those at the ends.

    >>> list(pieces((4, 6), (0, 1), most=12))
    [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    >>> list(pieces((4, 6), (1, 0), most=12))
    [((0, 4), (0, 3)), ((0, 4), (3, 6))]
    """
    unit = [1] * len(shape) if unit is None else unit
    step = [min(one, size) for one, size in zip(unit, shape, strict=True)]
    for axis in reversed(order):
        room = most // max(math.prod(step), 1)
        if room * step[axis] < shape[axis]:
            step[axis] *= max(room, 1)
            break
        step[axis] = shape[axis]
    cuts = [
        [(at, min(at + by, size)) for at in range(0, size, by)]
        for size, by in zip(shape, step, strict=True)
    ]
    outermost_first = itertools.product(*(cuts[axis] for axis in order))
    for chosen in outermost_first:
        yield tuple(chosen[list(order).index(axis)] for axis in range(len(shape)))
