"""Which completions are sampled together, in how many rows and columns.

Shapes come from few sizes, so that a run compiles few programs; which rows share a batch changes no
completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Batch", "Unit", "bucket", "plan_batches"]

ROW_STEP = 8
"""Rows of a batch are a multiple of about this: a slightly different request compiles nothing."""
SMALLEST_STEP = 16
"""Columns of a batch are a multiple of at least this."""


class Unit(NamedTuple):
    """Samples of one prompt that share its prefill."""

    prompt: int
    """Index of the prompt in the request."""
    first: int
    """Its first sample."""
    count: int
    """How many of its samples, at most `Batch.samples`."""


class Batch(NamedTuple):
    """Units that are sampled together; missing units and samples are filled with dummy rows."""

    units: tuple[Unit, ...]
    """At most `prompts`."""
    prompts: int
    """Rows of the prefill."""
    samples: int
    """Rows of the decoding a prompt."""
    columns: int
    """Columns of the prefill: the bucket of the longest prompt."""


def bucket(length: int) -> int:
    """The smallest allowed size that holds `length`: four sizes an octave, at least 16 apart.

    >>> [bucket(n) for n in (1, 16, 17, 100, 130, 1100)]
    [16, 16, 32, 112, 160, 1280]
    """
    step = max(SMALLEST_STEP, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


def plan_batches(
    lengths: Sequence[int], samples: int, batch_size: int, multiple: int = 1
) -> list[Batch]:
    """Split a request into batches of at most `batch_size` rows, of nearly equal row counts.

    Prompts of similar length meet in a batch. A prompt with more samples than rows is split, and
    its parts are filled evenly.

    Args:
        lengths: tokens of each prompt.
        samples: completions of each.
        batch_size: most rows at once, but never fewer than `multiple`.
        multiple: prompts of a batch are a multiple of this: the parts that a mesh splits rows into.
    """
    parts = -(-samples // max(batch_size // multiple, 1))
    rows = -(-samples // parts)
    units = [
        Unit(prompt, first, min(rows, samples - first))
        for prompt in sorted(range(len(lengths)), key=lambda i: lengths[i])
        for first in range(0, samples, rows)
    ]
    if not units:
        return []
    most = max(batch_size // rows // multiple, 1) * multiple
    count = -(-len(units) // most)
    step = math.lcm(max(1, ROW_STEP // rows), multiple)
    prompts = min(most, -(-len(units) // (count * step)) * step)
    return [
        Batch(tuple(chunk), prompts, rows, bucket(max(lengths[unit.prompt] for unit in chunk)))
        for chunk in (units[i : i + prompts] for i in range(0, len(units), prompts))
    ]
