"""Run by `test_hf_placed` where JAX sees eight CPU devices: weights onto meshes and back.

Usage: python placed_on_eight.py FOLDER, with a model of each family in a folder of its name. Writes
results.json there: for each scene what went wrong, or "".
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxrl.checkpoint import fetch, hf_export, hf_placed
from jaxrl.checkpoint.boxes import box_of, sizes, slices
from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.hf_check import differing
from jaxrl.checkpoint.hf_export import export_hf, hf_tensors
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import MeshConfig
from jaxrl.config_io import load_config
from jaxrl.errors import ConversionError
from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.sharding import make_mesh, param_sharding, replicated
from jaxrl.state import abstract_state, fresh_state, make_optimizers

OWN = ModelConfig("qwen3", 64, 16, 24, 3, 4, 2, 8, tie_word_embeddings=False)
"""A model that every mesh divides, its vocabulary included."""
MESHES = ((1, 8, 1), (1, 4, 2), (2, 2, 2), (8, 1, 1))
FAMILIES = ("llama-tied", "llama-untied", "mistral-untied", "qwen2-tied", "qwen3-tied")


def mesh_of(data: int, fsdp: int, tensor: int) -> Mesh:
    count = data * fsdp * tensor
    return make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[:count])


def shardings(mesh: Mesh, config: ModelConfig) -> dict[str, Any]:
    """As a run has them, but a vocabulary that does not divide stays whole."""
    tree: dict[str, Any] = {}
    for weight in weight_table(config):
        odd = config.vocab_size % mesh.shape["tensor"]
        axes = [None if axis == "vocab" and odd else axis for axis in weight.axes]
        node = tree
        for name in weight.path[:-1]:
            node = node.setdefault(name, {})
        node[weight.path[-1]] = param_sharding(mesh, "w", weight.full_shape, axes)
    return tree


def same(placed: Any, whole: Any, where: Any = None) -> None:
    """To the bit, and each array where it should be."""
    assert jax.tree.structure(placed) == jax.tree.structure(whole)
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
        other = np.asarray(other)
        assert one.dtype == other.dtype
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), other[shard.index])
    if where is not None:
        assert [x.sharding for x in jax.tree.leaves(placed)] == jax.tree.leaves(where)


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(load_hf_config(folder))


@contextmanager
def small_pieces(size: int) -> Iterator[None]:
    """Everything moves in pieces of at most `size` bytes."""
    with mock.patch.object(hf_placed, "PIECE_BYTES", size):
        with mock.patch.object(hf_export, "PIECE_BYTES", size):
            yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each read."""
    counts: list[int] = []
    real = os.preadv

    def read(handle: int, buffers: Any, at: int) -> int:
        counts.append(real(handle, buffers, at))
        return counts[-1]

    with mock.patch.object(os, "preadv", read):
        yield counts


def every_mesh(folder: Path) -> None:
    config = config_of(folder)
    whole = load_params(folder, config)
    for form in MESHES:
        where = shardings(mesh_of(*form), config)
        same(load_params(folder, config, shardings=where), whole, where)


def half_precision(root: Path) -> None:
    """bfloat16 in several files, float16; and bfloat16 parameters."""
    source = root / "qwen3-tied"
    config = config_of(source)
    params = load_params(source, config)
    export_hf(root / "bf16", params, config, dtype="bfloat16", max_shard_bytes=9000)
    assert len(list((root / "bf16").glob("*.safetensors"))) > 3
    shutil.copytree(source, root / "f16")
    half = {k: x.astype("f2") for k, x in load_file(source / "model.safetensors").items()}
    save_file(half, root / "f16" / "model.safetensors")
    where = shardings(mesh_of(2, 2, 2), config)
    for name in ("bf16", "f16"):
        for dtype in ("float32", "bfloat16"):
            placed = load_params(root / name, config, dtype=dtype, shardings=where)
            same(placed, load_params(root / name, config, dtype=dtype), where)


def in_pieces(own: Path) -> None:
    """Pieces of rows, of heads, of layers; there and back, the files are the same."""
    whole = load_params(own, OWN)
    before = (own / "model.safetensors").read_bytes()
    # On (2, 2, 2) a piece is at most 128 floats a device; on one device at most 1024.
    for form in ((2, 2, 2), (1, 1, 1)):
        where = shardings(mesh_of(*form), OWN)
        with small_pieces(4096):
            placed = load_params(own, OWN, shardings=where)
            same(placed, whole, where)
            with small_pieces(1000):
                back = export_hf(own.parent / "back", placed, OWN)
        assert (back / "model.safetensors").read_bytes() == before


def each_byte_once(own: Path) -> None:
    """What two devices hold is read for both; what lies side by side, in one stretch."""
    stored = sum(x.nbytes for x in load_file(own / "model.safetensors").values())
    where = shardings(mesh_of(2, 2, 2), OWN)
    with counted() as counts:
        load_params(own, OWN, shardings=where)
    tensors = sum(len(weight.hf_names()) for weight in weight_table(OWN))
    assert (sum(counts), len(counts)) == (stored, tensors)
    with small_pieces(1024), counted() as counts:
        load_params(own, OWN, shardings=where)
    assert sum(counts) == stored and max(counts) <= 1024


def a_stored_head(root: Path) -> None:
    """Of a tied model: it may be there, and must be the embedding's equal."""
    folder = root / "qwen2-tied-with-head"
    shutil.copytree(root / "qwen2-tied", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, file)
    config = config_of(folder)
    where = shardings(mesh_of(1, 8, 1), config)
    load_params(folder, config, shardings=where)
    tensors["lm_head.weight"][60, 31] += 1e-3
    save_file(tensors, file)
    try:
        load_params(folder, config, shardings=where)
    except ConversionError as error:
        assert "is not equal to model.embed" in str(error)
    else:
        raise AssertionError("a head that differs was passed over")


def gathered(own: Path) -> None:
    """A piece cut out by all devices together, as several processes do it."""
    mesh = mesh_of(1, 4, 2)
    placed = load_params(own, OWN, shardings=shardings(mesh, OWN))
    leaf = placed["layers"]["mlp"]["gate"]["kernel"]
    box = ((1, 2), (3, 14), (5, 20))
    gather = fetch._gatherer(replicated(mesh), sizes(box))
    there = np.asarray(gather(leaf, fetch._start(box)))
    np.testing.assert_array_equal(there, np.asarray(leaf)[slices(box)])
    np.testing.assert_array_equal(fetch.fetch(leaf, box), there)
    np.testing.assert_array_equal(fetch.fetch(leaf, box_of(leaf.shape)), np.asarray(leaf))


def other_meshes(own: Path) -> None:
    """A run's state, saved by fsdp=4, restored by tensor=2, data=8 and one device; exported."""
    config = load_config([], [f"model.path={own}", "critic.kind=model"])
    optimizers, model = make_optimizers(config), Model(OWN)
    state = fresh_state(config, model, mesh_of(1, 4, 1), optimizers)
    held = state.policy_params["embed"]["weight"].addressable_shards
    assert len(held) == 4 and held[0].data.shape == (64, 4)
    store = CheckpointStore(own.parent / "run", keep=1)
    store.save(3, state, {})
    store.wait()
    for form in ((1, 1, 2), (8, 1, 1), (1, 1, 1)):
        like = abstract_state(config, model, mesh_of(*form), optimizers)
        restored, _ = store.restore(3, like)
        same(restored, state, jax.tree.map(lambda leaf: leaf.sharding, like))
    policy, critic, _ = store.stored(3)
    assert critic["trunk"]["embed"]["weight"].shape == (64, 16)
    with small_pieces(1000):
        assert differing(hf_tensors(policy, OWN), own, "float32") == []
    store.close()


def main(root: Path) -> None:
    own = export_hf(root / "own", Model(OWN).init(jax.random.key(0)), OWN)
    scenes: dict[str, Any] = {f"mesh {name}": (every_mesh, root / name) for name in FAMILIES}
    scenes |= {
        "mesh own": (every_mesh, own),
        "half precision": (half_precision, root),
        "in pieces": (in_pieces, own),
        "each byte once": (each_byte_once, own),
        "a stored head": (a_stored_head, root),
        "gathered": (gathered, own),
        "other meshes": (other_meshes, own),
    }
    results = {}
    for name, (scene, folder) in scenes.items():
        try:
            scene(folder)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    (root / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    main(Path(sys.argv[1]))
