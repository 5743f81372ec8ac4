"""Buckets written without torch, read with it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxrl.checkpoint.hf_files import TensorSource
from jaxrl.errors import RolloutError
from jaxrl.rollout.sglang.bucket import flattened_bucket, split_into_buckets
from tests.rollout.sglang.unpickled import raw_bucket, tensors_in

RANDOM = np.random.default_rng(0)


def source(name: str, array: np.ndarray, shape: tuple[int, ...] | None = None) -> TensorSource:
    return TensorSource(name, array.shape if shape is None else shape, lambda: array)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


ARRAYS = {
    "model.embed_tokens.weight": normal(7, 4),
    "one.more": normal(3),
    "model.layers.0.größe": normal(2, 3, 5),
    "scalar": normal(),
    "large": normal(300, 300),
}


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype", "torch_dtype"),
    [
        ("float32", np.float32, torch.float32),
        ("bfloat16", ml_dtypes.bfloat16, torch.bfloat16),
    ],
)
def test_names_shapes_dtypes_and_values_come_back(dtype: str, numpy_dtype: Any, torch_dtype: Any):
    got = tensors_in(flattened_bucket([source(*item) for item in ARRAYS.items()], dtype))
    assert list(got) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert got[name].dtype is torch_dtype and tuple(got[name].shape) == array.shape
        np.testing.assert_array_equal(
            got[name].float().numpy(), array.astype(numpy_dtype).astype(np.float32), err_msg=name
        )


def test_arrays_may_be_bfloat16_already():
    array = normal(5, 6).astype(ml_dtypes.bfloat16)
    for dtype in ("bfloat16", "float32"):
        (got,) = tensors_in(flattened_bucket([source("a", array)], dtype)).values()
        np.testing.assert_array_equal(got.float().numpy(), array.astype(np.float32))


def test_the_ranges_are_in_bytes_and_follow_each_other():
    bucket = raw_bucket(flattened_bucket([source(*item) for item in ARRAYS.items()], "bfloat16"))
    flat, at = bucket["flattened_tensor"], 0
    assert flat.dtype is torch.uint8 and flat.ndim == 1 and flat.is_contiguous()
    for entry, array in zip(bucket["metadata"], ARRAYS.values(), strict=True):
        assert type(entry.shape) is torch.Size
        assert (entry.start_idx, entry.end_idx) == (at, at + 2 * array.size)
        assert entry.numel == 2 * array.size
        at = entry.end_idx
    assert flat.numel() == at


def test_views_are_sent_in_the_order_of_their_indices():
    base = normal(4, 6, 8)
    views = {
        "transposed": base.transpose(2, 0, 1),
        "strided": base[::2, ::-1, 1:7:3],
        "broadcast": np.broadcast_to(base[0, 0], (3, 8)),
    }
    got = tensors_in(flattened_bucket([source(*item) for item in views.items()], "float32"))
    for name, view in views.items():
        assert not view.flags.c_contiguous
        np.testing.assert_array_equal(got[name].numpy(), view, err_msg=name)


def test_an_empty_bucket_is_refused():
    with pytest.raises(RolloutError, match="at least one"):
        flattened_bucket([], "float32")


def test_a_tensor_of_another_shape_than_announced_is_refused():
    """A wrong shape would kill the server."""
    with pytest.raises(RolloutError, match=r"w has shape \(2, 3\), expected \(3, 2\)"):
        flattened_bucket([source("w", normal(2, 3), (3, 2))], "float32")


def test_buckets_keep_the_order_and_the_limit():
    sizes = [10, 10, 5, 100, 1, 24, 1]
    sources = [source(str(i), np.zeros(size)) for i, size in enumerate(sizes)]
    cut = split_into_buckets(sources, dtype="float32", bucket_bytes=100)
    # 25 numbers of 4 bytes fit; what is larger goes alone
    assert [[t.size for t in bucket] for bucket in cut] == [[10, 10, 5], [100], [1, 24], [1]]
    assert [t for bucket in cut for t in bucket] == sources
    cut = split_into_buckets(sources, dtype="bfloat16", bucket_bytes=100)
    assert [[t.size for t in bucket] for bucket in cut] == [[10, 10, 5], [100], [1, 24, 1]]
    assert split_into_buckets([], dtype="float32", bucket_bytes=1) == []


def test_settings_that_make_no_buckets_are_refused():
    with pytest.raises(RolloutError, match=r"float16.*bfloat16.*float32"):
        split_into_buckets([], dtype="float16", bucket_bytes=1)
    with pytest.raises(RolloutError, match="bucket_bytes=0 must be positive"):
        split_into_buckets([], dtype="float32", bucket_bytes=0)
