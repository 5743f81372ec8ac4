"""Single arrays of a checkpoint: read by slice, and compared with a folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl.checkpoint.boxes import Box
from jaxrl.checkpoint.fetch import fetch
from jaxrl.checkpoint.hf_check import differing
from jaxrl.checkpoint.hf_files import Piece, TensorSource, write_safetensors
from jaxrl.checkpoint.hf_stored import stored_tensors
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.checkpoint.stream import cuts, stored_arrays
from jaxrl.errors import CheckpointError, ConversionError
from tests.checkpoint.states import make_state


def test_a_slice_is_what_was_saved(store: CheckpointStore) -> None:
    """float32 and bfloat16; an array of 8 MB in chunks of a layer each."""
    half = jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6)
    large = jnp.arange(2**21, dtype=jnp.float32).reshape(4, 512, 1024)
    state = dataclasses.replace(
        make_state(1), policy_params={"half": half, "layers": {"large": large}}
    )
    store.save(1, state, {"note": "here"})
    store.wait()
    policy, critic, host = store.stored(1)
    assert host["note"] == "here" and critic["value_head"]["kernel"].shape == (4, 1)
    assert policy["layers"]["large"].chunk == (1, 512, 1024)
    for found, saved in ((policy["half"], half), (policy["layers"]["large"], large)):
        assert (found.shape, found.dtype) == (saved.shape, saved.dtype)
        box: Box = tuple((1, size - 1) for size in saved.shape)
        part = fetch(found, box)
        np.testing.assert_array_equal(part, np.asarray(saved)[tuple(slice(*ends) for ends in box)])
    restored, _ = store.restore(1, jax.tree.map(jnp.zeros_like, state))
    np.testing.assert_array_equal(restored.policy_params["layers"]["large"], large)


def test_a_critic_that_is_not_there_is_empty(store: CheckpointStore) -> None:
    store.save(2, dataclasses.replace(make_state(2), value_params={}), {})
    store.wait()
    assert store.stored(2)[1] == {}


def test_an_array_that_is_not_there_is_named(store: CheckpointStore) -> None:
    store.save(3, make_state(3), {})
    store.wait()
    folder = store.folder / "00000003" / "arrays"
    with pytest.raises(CheckpointError, match="policy_params/absent in .*arrays cannot be read"):
        stored_arrays(folder, ["policy_params/embed", "policy_params/absent"])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("policy_params/layers/norm/scale", (28, 1024), {}),
        ("policy_params/embed/weight", (1024, 1024), {"shard_axes": ()}),
        ("policy_opt/0/mu/layers/mlp/up/kernel", (2, 512, 1024), {"shard_axes": (0,)}),
    ],
)
def test_only_large_arrays_are_cut(name: str, shape: tuple[int, ...], expected: dict) -> None:
    found = cuts(name, shape, "float32")
    assert found == ({**expected, "chunk_byte_size": 16 * 2**20} if expected else {})


def source(name: str, array: np.ndarray) -> TensorSource:
    return TensorSource(name, array.shape, lambda: array)


def test_every_difference_from_a_folder_is_named(tmp_path: Path) -> None:
    arrays = {name: np.arange(6, dtype=np.float32).reshape(2, 3) for name in "abcd"}
    save_file({**arrays, "d": arrays["d"].T.copy()}, tmp_path / "model.safetensors")
    moved = arrays["b"].copy()
    moved[1, 2] += 0.5
    tensors = [
        source("a", arrays["a"]),
        source("b", moved),
        source("d", arrays["d"]),
        source("e", arrays["a"]),
    ]
    assert differing(tensors, tmp_path, "float32") == [
        "b: 1 elements, by up to 5.00e-01",
        "d: [3, 2] instead of [2, 3]",
        "e: missing",
    ]
    assert differing(tensors[:1], tmp_path, "bfloat16") == []
    nan = np.full(3, np.nan, np.float32)
    save_file({"n": nan}, tmp_path / "n.safetensors")
    assert differing([source("n", nan)], tmp_path / "n.safetensors", "float32") == []


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((100, 10), np.float32)}, file)
    with stored_tensors(tmp_path) as stored:
        with file.open("r+b") as opened:
            opened.truncate(2000)
        stored["a"].read(box=((0, 10), (0, 10)))
        with pytest.raises(ConversionError, match="model.safetensors has become shorter: .* a"):
            stored["a"].read(box=((90, 100), (0, 10)))


def test_a_piece_of_another_shape_than_said_is_refused(tmp_path: Path) -> None:
    wrong = Piece((4, 4), ((0, 2), (0, 4)), np.zeros((4, 2), np.float32))
    tensor = TensorSource("a", (4, 4), lambda: wrong.array, lambda: iter([wrong]))
    with pytest.raises(ConversionError, match=r"a has shape \(4, 2\), expected \(2, 4\)"):
        write_safetensors(tmp_path / "a.safetensors", [tensor], "float32")
