"""Weights read by slice: equal to whole loads on every mesh, no byte too many, little memory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.checkpoint.boxes import joined, pieces, runs, slices
from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.checkpoint.hf_stored import stored_tensors
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.models import Model, weight_table
from tests.checkpoint.families import Folder
from tests.checkpoint.placed_on_eight import FAMILIES, OWN

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import measure_memory

HERE = Path(__file__).parent
SCENES = [f"mesh {name}" for name in (*FAMILIES, "own")]
SCENES += ["half precision", "in pieces", "each byte once", "a stored head", "gathered"]
SCENES += ["other meshes"]


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


@pytest.fixture(scope="module")
def results(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each scene what went wrong on eight devices, or nothing."""
    root = tmp_path_factory.mktemp("eight")
    for family in FAMILIES:
        shutil.copytree(tiny_folder(family), root / family)
    command = [sys.executable, str(HERE / "placed_on_eight.py"), str(root)]
    subprocess.run(command, env=environment(8), check=True, timeout=300)
    return json.loads((root / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("scene", SCENES)
def test_on_eight_devices(scene: str, results: dict[str, str]) -> None:
    assert results.keys() == set(SCENES)
    assert not results[scene], results[scene]


def test_two_processes_read_their_halves_and_export_together(tmp_path: Path) -> None:
    own = export_hf(tmp_path / "own", Model(OWN).init(jax.random.key(0)), OWN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "placed_by_two.py"), str(tmp_path), str(port)]
    both = [
        subprocess.Popen([*command, str(i)], env=environment(2), stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    # Half of what is split over fsdp, all of what is not, in float32.
    elements = sum(
        np.prod(weight.full_shape) / (2 if "embed" in weight.axes else 1)
        for weight in weight_table(OWN)
    )
    assert [int(words[-1]) for words in said] == [4 * elements] * 2
    name = "model.safetensors"
    assert (tmp_path / "exported" / name).read_bytes() == (own / name).read_bytes()


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 4, 5), (2, 3, 2, 4)])
def test_boxes_are_found_in_the_bytes(shape: tuple[int, ...]) -> None:
    numbers, random = np.arange(np.prod(shape)).reshape(shape), np.random.default_rng(len(shape))
    for _ in range(50):
        starts = [int(random.integers(0, size)) for size in shape]
        stops = [
            int(random.integers(a + 1, size + 1)) for a, size in zip(starts, shape, strict=True)
        ]
        box = tuple(zip(starts, stops, strict=True))
        begins, length = runs(shape, box)
        there = (begins[:, None] + np.arange(length)).reshape(-1)
        np.testing.assert_array_equal(there, numbers[slices(box)].reshape(-1))
        assert len(begins) == 1 or not any(np.diff(begins) == length)  # as long as they can be


@pytest.mark.parametrize("most", [1, 5, 12, 1000])
@pytest.mark.parametrize("unit", [None, (1, 2, 5), (3, 3, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_pieces_cover_an_array_once(
    order: tuple[int, ...], unit: tuple[int, ...] | None, most: int
) -> None:
    shape = (3, 7, 5)
    seen = np.zeros(shape, int)
    found = list(pieces(shape, order, most, unit))
    for box in found:
        seen[slices(box)] += 1
        assert seen[slices(box)].size <= max(most, np.prod(unit or 1))
        if unit:
            assert all(start % u == 0 for (start, _), u in zip(box, unit, strict=True))
    assert (seen == 1).all()
    assert joined(found) == tuple((0, size) for size in shape)
    assert len(found) < 3 or joined([found[0], found[-1]]) is None


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 250 MB, 500 in float32, a third of that its embedding; in sharded files."""
    folder = tmp_path_factory.mktemp("large")
    assert measure_memory.make_model(folder / "model", 0.25, layers=2) > 230e6
    return folder


def test_loading_and_exporting_hold_a_few_pieces_of_a_model(large: Path) -> None:
    """At the peak, beside an idle process and its devices; the embedding would be too much."""
    found = measure_memory.run_case("export", 4, large)
    assert found["shards"] > 460e6
    assert found["extra"] < 256 * 2**20, found


def test_converting_holds_a_few_pieces_of_a_checkpoint(large: Path) -> None:
    """From what four devices wrote, a checkpoint of 500 MB, to a folder; and both compared."""
    loaded = measure_memory.run_case("save", 4, large)
    assert loaded["extra"] < 256 * 2**20, loaded
    found = measure_memory.run_case("convert", 1, large)
    assert found["shards"] == 0 and found["extra"] < 256 * 2**20, found
    with stored_tensors(large / "model") as one, stored_tensors(large / "converted") as other:
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            np.testing.assert_array_equal(tensor.read(), other[name].read(), err_msg=name)


def test_large_arrays_are_saved_apart_by_layer(large: Path) -> None:
    """So that a layer, or some rows, can be read alone; reading any of a chunk reads all of it."""
    store = CheckpointStore(large / "checkpoints", keep=1)
    policy, _, _ = store.stored(0)
    gate, embed = policy["layers"]["mlp"]["gate"]["kernel"], policy["embed"]["weight"]
    assert gate.shape[0] == 2 and gate.chunk[0] == 1
    for array in (gate, embed, policy["head"]["kernel"]):
        assert np.prod(array.chunk) * 4 <= 16 * 2**20 < np.prod(array.shape) * 4
    store.close()
