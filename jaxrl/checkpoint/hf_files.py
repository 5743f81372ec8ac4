"""Writing model folders: one piece at a time, and folders that appear whole or not at all.

The safetensors format is an 8-byte little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, and the raw bytes. Writing it directly lets an export hold
one piece of a tensor in memory at a time instead of a whole file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxrl.checkpoint.boxes import Box, box_of, runs, sizes
from jaxrl.errors import ConversionError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# Our dtype name -> (numpy dtype, name in a safetensors header).
DTYPES: dict[str, tuple[np.dtype, str]] = {
    "float32": (np.dtype(np.float32), "F32"),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), "BF16"),
}


class Piece(NamedTuple):
    """A part of a tensor that is being written."""

    shape: tuple[int, ...]
    """The tensor's, or another of as many elements that it is seen as."""
    box: Box
    """Which part of that."""
    array: np.ndarray


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is made only when it is written.

    Args:
        name: Its name in the file.
        shape: Its shape, needed before it exists: the header comes first.
        make: Returns the array.
        cut: Makes it in pieces instead, that cover it once; None: it comes in one.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    cut: Callable[[], Iterator[Piece]] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def pieces(self) -> Iterator[Piece]:
        """The tensor, a piece at a time.

        Raises:
            ConversionError: One comes out in another shape than said.
        """
        whole = box_of(self.shape)
        cut = self.cut or (lambda: iter([Piece(self.shape, whole, self.make())]))
        for piece in cut():
            if piece.array.shape != sizes(piece.box):
                raise ConversionError(
                    f"{self.name} has shape {piece.array.shape}, expected {sizes(piece.box)}"
                )
            yield piece


def write_safetensors(path: Path, tensors: Sequence[TensorSource], dtype: str) -> None:
    """Writes tensors to one safetensors file, in the order given, one piece in memory at a time.

    Args:
        path: The file to write.
        tensors: What to write.
        dtype: "float32" or "bfloat16"; every tensor is cast to it.

    Raises:
        ConversionError: For another dtype, or a tensor that comes out in another shape than said.
    """
    numpy_dtype, header_dtype = _dtype(dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, offset = [], 0
    for tensor in tensors:
        end = offset + tensor.size * numpy_dtype.itemsize
        header[tensor.name] = {
            "dtype": header_dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        begins.append(offset)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    head = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + offset)
        file.flush()
        for tensor, begin in zip(tensors, begins, strict=True):
            for piece in tensor.pieces():
                _write_piece(file.fileno(), len(head) + begin, piece, numpy_dtype)
        os.fsync(file.fileno())


def _write_piece(handle: int, begin: int, piece: Piece, dtype: np.dtype) -> None:
    # A transposed view would be written in the order of its memory, not of its indices.
    data = np.ascontiguousarray(piece.array, dtype=dtype).reshape(-1).view(np.uint8).data
    starts, length = runs(piece.shape, piece.box)
    span = length * dtype.itemsize
    for number, start in enumerate(starts.tolist()):
        rest, at = data[number * span : (number + 1) * span], begin + start * dtype.itemsize
        while rest:
            count = os.pwrite(handle, rest, at)
            rest, at = rest[count:], at + count


def write_file(path: str | Path, tensors: Sequence[TensorSource], dtype: str) -> Path:
    """Writes one safetensors file that appears whole or not at all.

    Args:
        path: Its name, ending in .safetensors; an older file of that name is replaced.
        tensors: What to write.
        dtype: "float32" or "bfloat16".

    Raises:
        ConversionError: It is named otherwise, or is a folder.
    """
    path = Path(path)
    if path.suffix != ".safetensors" or path.is_dir():
        raise ConversionError(f"{path} must be the name of a file that ends in .safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write_safetensors(partial, tensors, dtype)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_weights(
    folder: Path, tensors: Sequence[TensorSource], *, dtype: str, max_shard_bytes: int
) -> None:
    """Writes `model.safetensors`, or numbered shards and their index when it would be too large.

    Args:
        folder: Where the files go.
        tensors: What to write.
        dtype: "float32" or "bfloat16".
        max_shard_bytes: Largest size of a file's tensors; a tensor larger than that gets a file
            of its own.
    """
    shards = _split(tensors, _dtype(dtype)[0].itemsize, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS_NAME, shards[0], dtype)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, dtype)
        weight_map.update({tensor.name: name for tensor in shard})
    total = sum(tensor.size for tensor in tensors) * _dtype(dtype)[0].itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX_NAME, index)


def write_json(path: Path, content: object) -> None:
    """Writes indented JSON, readable by a person, with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(out: str | Path) -> Iterator[Path]:
    """Gives a temporary folder that becomes `out` when the block ends well, and is removed if not.

    An older model folder at `out` stays untouched until the new one is complete.

    Args:
        out: The folder to create or replace.

    Yields:
        The temporary folder, beside `out`.

    Raises:
        ConversionError: When `out` holds something that is not a model folder.
    """
    target = Path(out)
    if target.exists() and not _may_replace(target):
        raise ConversionError(
            f"{target} exists and is no model folder (it has no config.json); "
            "give another output folder or remove it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        old = target.parent / f".{target.name}.old-{os.getpid()}"
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _may_replace(target: Path) -> bool:
    if not target.is_dir():
        return False
    return (target / "config.json").is_file() or not any(target.iterdir())


def _dtype(name: str) -> tuple[np.dtype, str]:
    if name not in DTYPES:
        raise ConversionError(f"dtype={name!r} cannot be written; use one of {sorted(DTYPES)}")
    return DTYPES[name]


def _split(
    tensors: Sequence[TensorSource], itemsize: int, max_shard_bytes: int
) -> list[list[TensorSource]]:
    if max_shard_bytes <= 0:
        raise ConversionError(f"max_shard_bytes={max_shard_bytes} must be positive")
    shards: list[list[TensorSource]] = [[]]
    filled = 0
    for tensor in tensors:
        size = tensor.size * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards
