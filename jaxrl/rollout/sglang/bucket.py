"""Weights as SGLang's ``/update_weights_from_tensor`` reads them, written without torch.

A payload (``load_format`` "flattened_bucket") is the base64 of a Python pickle of
``{"metadata": [FlattenedTensorMetadata, ...], "flattened_tensor": uint8 tensor}``: the raw bytes of
all tensors joined, and for each its name, shape, dtype and byte range. The server unpickles it with
an allow-list of globals. Those used here are on it::

    sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata
    torch.Size, torch.float32, torch.bfloat16
    torch._utils._rebuild_tensor_v2, torch.storage._load_from_bytes    the tensor and its memory
    collections.OrderedDict                                            its (absent) backward hooks

``_load_from_bytes`` takes a storage in the format that ``torch.save`` wrote before it wrote zip
files: five pickles one after another, then the size and the bytes. torch reads it in its
``weights_only`` mode, whose own allow-list holds ``torch.ByteStorage``.

A pickle is a program for a stack machine. Below, a *fragment* is the bytes that push one value; the
fragments of parts are joined into that of a whole, so nothing of torch needs to be importable. The
weights are copied once, into their place in the finished program.
"""

from __future__ import annotations

import binascii
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.checkpoint.hf_files import DTYPES, TensorSource
from jaxrl.errors import RolloutError

__all__ = ["flattened_bucket", "split_into_buckets"]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001


def split_into_buckets(
    tensors: Sequence[TensorSource], *, dtype: str, bucket_bytes: int
) -> list[list[TensorSource]]:
    """Cut a list of tensors, in order, into buckets; none is made.

    Args:
        tensors: what to cut.
        dtype: "float32" or "bfloat16", in which they will be packed.
        bucket_bytes: most bytes of weights in a bucket. A larger tensor gets one of its own.

    Raises:
        RolloutError: `dtype` or `bucket_bytes` is none.
    """
    if dtype not in DTYPES:
        raise RolloutError(f"dtype={dtype!r} cannot be sent; use one of {sorted(DTYPES)}")
    if bucket_bytes <= 0:
        raise RolloutError(f"bucket_bytes={bucket_bytes} must be positive")
    itemsize = DTYPES[dtype][0].itemsize
    buckets: list[list[TensorSource]] = []
    room = 0
    for tensor in tensors:
        size = tensor.size * itemsize
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(tensor)
        room -= size
    return buckets


def flattened_bucket(tensors: Sequence[TensorSource], dtype: str) -> str:
    """Make `tensors` one after another and pack them.

    Args:
        tensors: at least one; made here.
        dtype: "float32" or "bfloat16"; every tensor is cast to it.

    Returns:
        One entry of ``serialized_named_tensors``.

    Raises:
        RolloutError: there is no tensor, or one comes out in another shape than it said.
    """
    if not tensors:
        raise RolloutError("a bucket without tensors: SGLang takes none; give at least one")
    itemsize = DTYPES[dtype][0].itemsize
    ends = np.cumsum([tensor.size * itemsize for tensor in tensors]).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    before, after = _frame(tensors, spans, dtype)
    payload = bytearray(len(before) + ends[-1] + len(after))
    payload[: len(before)] = before
    payload[len(payload) - len(after) :] = after
    flat = np.frombuffer(payload, np.uint8, count=ends[-1], offset=len(before))
    for tensor, (start, end) in zip(tensors, spans, strict=True):
        flat[start:end] = _raw_bytes(tensor, dtype)
    text = binascii.b2a_base64(payload, newline=False)
    del flat, payload  # a bucket is large: not held while the text is copied once more
    return text.decode("ascii")


def _raw_bytes(tensor: TensorSource, dtype: str) -> np.ndarray:
    array = tensor.make()
    if array.shape != tensor.shape:
        raise RolloutError(f"{tensor.name} has shape {array.shape}, expected {tensor.shape}")
    # A transposed view would be copied in the order of its memory, not of its indices.
    return np.ascontiguousarray(array, dtype=DTYPES[dtype][0]).reshape(-1).view(np.uint8)


def _frame(
    tensors: Sequence[TensorSource], spans: Sequence[tuple[int, int]], dtype: str
) -> tuple[bytes, bytes]:
    """What stands in the pickle before and after the weights' bytes."""
    entry = _global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    metadata = []
    for tensor, (start, end) in zip(tensors, spans, strict=True):
        fields = {
            "name": _plain(tensor.name),
            "shape": _call(_global("torch", "Size"), _plain(tensor.shape)),
            "dtype": _global("torch", dtype),
            # All three in bytes, whatever the last one's name suggests.
            "start_idx": _plain(start),
            "end_idx": _plain(end),
            "numel": _plain(end - start),
        }
        metadata.append(_instance(entry, _dict(fields)))
    length = spans[-1][1]
    storage_head = _storage_head(length)
    before = [
        pickle.PROTO + b"\x04",
        *(pickle.EMPTY_DICT, pickle.MARK),
        *(_plain("metadata"), _list(metadata)),
        # _rebuild_tensor_v2(_load_from_bytes(<here>), offset, shape, strides, grad, hooks)
        *(_plain("flattened_tensor"), _global("torch._utils", "_rebuild_tensor_v2"), pickle.MARK),
        *(_global("torch.storage", "_load_from_bytes"), pickle.MARK),
        pickle.BINBYTES8 + struct.pack("<Q", len(storage_head) + length) + storage_head,
    ]
    after = [
        *(pickle.TUPLE, pickle.REDUCE),
        *(_plain(0), _plain((length,)), _plain((1,)), _plain(False)),
        _call(_global("collections", "OrderedDict")),
        *(pickle.TUPLE, pickle.REDUCE, pickle.SETITEMS, pickle.STOP),
    ]
    return b"".join(before), b"".join(after)


def _storage_head(length: int) -> bytes:
    """A uint8 storage of `length` bytes in torch's legacy format, up to those bytes.

    Its five pickles are the magic number, the format's version, the system it was written on, the
    object, and the keys of the storages that follow. The object is a mere reference to the storage
    with key "0": a persistent id, as torch calls its storages.
    """
    system = {
        "protocol_version": _LEGACY_VERSION,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    reference = (
        *(_plain("storage"), _global("torch", "ByteStorage")),
        *(_plain("0"), _plain("cpu"), _plain(length), _plain(None)),  # key, place, size, no view
    )
    programs = (
        _plain(_LEGACY_MAGIC),
        _plain(_LEGACY_VERSION),
        _plain(system),
        _tuple(*reference) + pickle.BINPERSID,
        _plain(["0"]),
    )
    whole = (pickle.PROTO + b"\x02" + program + pickle.STOP for program in programs)
    return b"".join(whole) + struct.pack("<q", length)


def _plain(value: Any) -> bytes:
    """Fragment of a value of Python's own: a protocol 2 pickle without its first and last opcode.

    What it memoises may overwrite an earlier fragment's, which is never asked for again.
    """
    return pickle.dumps(value, protocol=2)[2:-1]


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _list(items: Sequence[bytes]) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(items) + pickle.APPENDS


def _dict(items: dict[str, bytes]) -> bytes:
    inside = b"".join(_plain(key) + value for key, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + inside + pickle.SETITEMS


def _call(function: bytes, *arguments: bytes) -> bytes:
    return function + _tuple(*arguments) + pickle.REDUCE


def _instance(of: bytes, state: bytes) -> bytes:
    """``of.__new__(of)``, whose ``__dict__`` becomes `state`."""
    return of + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD
