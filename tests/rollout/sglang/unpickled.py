"""Payloads of /update_weights_from_tensor read as the server reads them: by a list of globals."""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class FlattenedTensorMetadata:
    """Stands for SGLang's, which is not installed here."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _load_from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


_GLOBALS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): FlattenedTensorMetadata,
    ("torch", "Size"): torch.Size,
    ("torch", "bfloat16"): torch.bfloat16,
    ("torch", "float32"): torch.float32,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _load_from_bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} is not on the list")
        return _GLOBALS[module, name]


def raw_bucket(payload: str) -> dict[str, Any]:
    """The flat tensor and the metadata."""
    stream = io.BytesIO(base64.b64decode(payload, validate=True))
    bucket = _Unpickler(stream).load()
    assert not stream.read()
    return bucket


def tensors_in(payload: str) -> dict[str, torch.Tensor]:
    """What the server makes of it."""
    bucket = raw_bucket(payload)
    flat = bucket["flattened_tensor"]
    return {
        entry.name: flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        for entry in bucket["metadata"]
    }
