"""Arrays of a checkpoint read from disk slice by slice, by a host that has no room for them whole.

Orbax writes each array as chunks in a key-value store of TensorStore's, and restores whole arrays.
Here the same store is opened to read parts. A chunk is always read whole, so `cuts` keeps them
small, and apart by layer, where an array is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16 by name)
import numpy as np
import tensorstore as ts

from jaxrl.checkpoint.boxes import CHUNK_BYTES
from jaxrl.errors import CheckpointError

__all__ = ["StoredArray", "cuts", "stored_arrays"]

_LARGE = 2**20


@dataclass(frozen=True)
class StoredArray:
    """An array on disk; indexing with slices reads that part of it."""

    name: str
    folder: Path
    store: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        """As it was saved."""
        return np.dtype(self.store.dtype.numpy_dtype)

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of the parts that are on disk."""
        return tuple(self.store.chunk_layout.read_chunk.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The part that `index` names.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            return self.store[index].read().result()
        except (ValueError, OSError) as error:
            raise _unreadable(self.folder, self.name, error) from error


def stored_arrays(folder: Path, names: Iterable[str]) -> dict[str, StoredArray]:
    """Opens arrays of a checkpoint, by name; reads nothing of them yet.

    Args:
        folder: What Orbax wrote.
        names: E.g. policy_params/embed/weight.

    Raises:
        CheckpointError: One of them is not there.
    """
    # Nothing is kept in memory: each part is asked for once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    found = {}
    for name in names:
        base = {"driver": "file", "path": f"{folder}/"}
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            store = ts.open(spec, open=True, read=True, context=context).result()
        except (ValueError, OSError) as error:
            raise _unreadable(folder, name, error) from error
        found[name] = StoredArray(name, folder, store)
    return found


def cuts(name: str, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """How an array is cut into chunks when it is saved: Orbax's settings for it.

    Args:
        name: Its path in the state; of one below "layers" the first axis counts layers.
        shape: Its shape.
        dtype: Its type's name.
    """
    if math.prod(shape) * np.dtype(dtype).itemsize <= _LARGE:
        return {}
    by_layer = "layers" in name.split("/")
    return {"shard_axes": (0,) if by_layer else (), "chunk_byte_size": CHUNK_BYTES}


def _unreadable(folder: Path, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{name} in {folder} cannot be read: {error}")
