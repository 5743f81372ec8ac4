"""Is what is in a folder what it was made from? Compared tensor by tensor, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16 by name)
import numpy as np

from jaxrl.checkpoint.hf_files import TensorSource
from jaxrl.checkpoint.hf_stored import StoredTensor, stored_tensors

__all__ = ["differing"]


def differing(tensors: Sequence[TensorSource], path: str | Path, dtype: str) -> list[str]:
    """Compares tensors with those in a folder, holding a few pieces of one in memory at a time.

    Args:
        tensors: What the folder should hold; it may hold more.
        path: A model folder, or one safetensors file.
        dtype: What they are rounded to before.

    Returns:
        A line for each tensor that is missing, of another shape, or not equal in every bit.

    Raises:
        ConversionError: The files cannot be read.
    """
    with stored_tensors(Path(path)) as stored:
        lines = [_difference(tensor, stored, np.dtype(dtype)) for tensor in tensors]
    return [line for line in lines if line]


def _difference(
    tensor: TensorSource, stored: Mapping[str, StoredTensor], dtype: np.dtype
) -> str | None:
    found = stored.get(tensor.name)
    if found is None:
        return f"{tensor.name}: missing"
    if found.shape != tensor.shape:
        return f"{tensor.name}: {list(found.shape)} instead of {list(tensor.shape)}"
    count, largest = 0, 0.0
    for shape, box, array in tensor.pieces():
        ours = np.ascontiguousarray(array.astype(dtype), np.float32)
        theirs = found.read(shape, box).astype(np.float32)
        other = ours.view(np.uint32) != theirs.view(np.uint32)
        if other.any():
            count += int(other.sum())
            largest = max(largest, float(np.abs(ours - theirs)[other].max()))
    return f"{tensor.name}: {count} elements, by up to {largest:.2e}" if count else None
