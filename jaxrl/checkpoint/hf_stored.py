"""Tensors in the safetensors files of a folder: found by their headers, read by box.

Of a box only its bytes are read, straight into the array that is returned. The files are not mapped
into memory: pages that a process has touched in a mapping count as its memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.checkpoint.boxes import Box, box_of, runs, sizes
from jaxrl.checkpoint.hf_files import INDEX_NAME, WEIGHTS_NAME
from jaxrl.errors import ConversionError

__all__ = ["FLOATS", "StoredTensor", "json_object", "stored_tensors"]

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
"""Types that are read, by their names in a header."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: what the header says, and where its bytes are."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As the header calls it."""
    begin: int
    """Where its bytes begin in the file."""
    handle: int
    """Of the open file."""

    def read(self, shape: Sequence[int] | None = None, box: Box | None = None) -> np.ndarray:
        """The elements of a box, in the file's type; reads these bytes and no others.

        Args:
            shape: The tensor's own, or another of as many elements that it is seen as.
            box: Which part of that; all of it if not given.

        Raises:
            ConversionError: The file ends before, or cannot be read.
        """
        shape = self.shape if shape is None else shape
        box = box_of(shape) if box is None else box
        array = np.empty(sizes(box), FLOATS[self.dtype])
        begins, length = runs(shape, box)
        span, target = length * array.itemsize, array.reshape(-1).view(np.uint8).data
        for number, begin in enumerate(begins.tolist()):
            at = self.begin + begin * array.itemsize
            self._fill(target[number * span : (number + 1) * span], at)
        return array

    def _fill(self, target: memoryview, at: int) -> None:
        while target:
            try:
                count = os.preadv(self.handle, [target], at)
            except OSError as error:
                raise ConversionError(f"{self.file}: cannot read {self.name}: {error}") from error
            if count == 0:
                raise ConversionError(
                    f"{self.file} has become shorter: it ends within {self.name}; fetch it again"
                )
            target, at = target[count:], at + count


@contextmanager
def stored_tensors(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """Opens a folder's safetensors files, or a single one, and gives all tensors by name, unread.

    Raises:
        ConversionError: Naming the file that is missing, cut short or not safetensors, or the
            tensor that is in two of them.
    """
    found: dict[str, StoredTensor] = {}
    with ExitStack() as stack:
        for path in _weight_files(folder):
            _check_file(path)
            handle = os.open(path, os.O_RDONLY)
            stack.callback(os.close, handle)
            for tensor in _header(path, handle):
                if tensor.name in found:
                    other = found[tensor.name].file
                    raise ConversionError(f"{tensor.name} is both in {other} and in {path}")
                found[tensor.name] = tensor
        yield found


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConversionError: It is something else, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _check_file(path: Path) -> None:
    """The library's own checks: types, and that byte ranges fit shapes, each other and the file."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            f"{path} is cut short or is no safetensors file ({error}); fetch it again"
        ) from error


def _header(path: Path, handle: int) -> Iterator[StoredTensor]:
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    for name, entry in json.loads(os.pread(handle, length, 8)).items():
        if name != "__metadata__":
            begin = 8 + length + entry["data_offsets"][0]
            yield StoredTensor(name, path, tuple(entry["shape"]), entry["dtype"], begin, handle)


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        advice = (
            f"it has {', '.join(others)}: pickled weights are not read, convert them first with "
            "transformers' save_pretrained"
            if others
            else "give a folder that holds safetensors files"
        )
        raise ConversionError(f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; {advice}")
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index} has no weight_map; fetch it again")
    files = sorted({folder / name for name in weight_map.values()})
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        raise ConversionError(f"{index} names files that are missing: {', '.join(absent)}")
    return files
