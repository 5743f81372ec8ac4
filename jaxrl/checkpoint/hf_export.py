"""Hugging Face folders out: what `AutoModelForCausalLM.from_pretrained` and servers load.

Tensors are fetched from the devices, or from a checkpoint on disk, turned into Hugging Face's
layout and written a piece at a time: the host needs room for a few pieces, not for the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.checkpoint.boxes import CHUNK_BYTES, PIECE_BYTES, Box, box_of, pieces
from jaxrl.checkpoint.fetch import fetch, unit_of
from jaxrl.checkpoint.hf import load_hf_config
from jaxrl.checkpoint.hf_files import Piece, TensorSource, whole_folder, write_json, write_weights
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig, Weight, weight_table

# Everything a server needs beside config and weights, where the source folder has it.
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "LICENSE",
    "NOTICE",
)
_TRAIN_ONLY = ("value_head",)


def export_hf(
    out: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a policy as a Hugging Face folder, whole or not at all.

    Args:
        out: The folder to write. An older model folder there is replaced at the very end.
        params: The decoder's parameters as `load_params` returns them: numpy or jax arrays, or
            those of `CheckpointStore.stored`. A `value_head` among them is left out; anything else
            that has no place is refused.
        config: What the parameters are.
        source: A Hugging Face folder of the same model, whose config (with the dtype changed),
            generation config, tokenizer files and chat template are taken over. Without it there is
            only a config made from `config`.
        dtype: "float32" or "bfloat16".
        max_shard_bytes: Weights beyond that many bytes are split into shards with an index.

    Returns:
        `out`, as a path.

    Raises:
        ConversionError: Listing parameters that are missing, unexpected or of the wrong shape; or
            because `source` is another model, or `out` is something else than a model folder.
    """
    tensors = hf_tensors(params, config)
    return write_hf_folder(
        out, tensors, described(config, source, dtype), source, dtype, max_shard_bytes
    )


def write_hf_folder(
    out: str | Path,
    tensors: Sequence[TensorSource],
    hf_config: Mapping[str, Any],
    source: str | Path | None,
    dtype: str,
    max_shard_bytes: int,
) -> Path:
    """Writes config, tokenizer files and weights, whole or not at all; see `export_hf`."""
    with whole_folder(out) as folder:
        write_json(folder / "config.json", hf_config)
        if source is not None:
            _copy_files(Path(source), folder)
        if not (folder / "generation_config.json").exists():
            ids = ("bos_token_id", "eos_token_id", "pad_token_id")
            found = {name: hf_config[name] for name in ids if hf_config.get(name) is not None}
            write_json(folder / "generation_config.json", found)
        write_weights(folder, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return Path(out)


def hf_tensors(params: Mapping[str, Any], config: ModelConfig) -> list[TensorSource]:
    """All tensors of a policy in Hugging Face's names and layout, sorted by name.

    Args:
        params: The decoder's parameters; see `export_hf`. If they lie on the devices of several
            processes, each process asks for the same tensors, or pieces, in the same order.
        config: What they are.

    Returns:
        A source for each tensor of the weights table; nothing is fetched until it is asked for.

    Raises:
        ConversionError: Listing parameters that are missing, unexpected or of the wrong shape.
    """
    policy = {name: tree for name, tree in params.items() if name not in _TRAIN_ONLY}
    return table_tensors(policy, weight_table(config))


def table_tensors(params: Mapping[str, Any], table: Sequence[Weight]) -> list[TensorSource]:
    """The tensors of a weights table, sorted by name; `params` must fit it exactly."""
    leaves = dict(_leaves(params))
    _check_fit(leaves, table)
    tensors = []
    for weight in table:
        for layer, name in enumerate(weight.hf_names()):
            where = (weight, leaves[weight.path], layer)
            make, cut = partial(_hf_tensor, *where), partial(_hf_pieces, *where)
            tensors.append(TensorSource(name, weight.hf_shape, make, cut))
    return sorted(tensors, key=lambda tensor: tensor.name)


def described(config: ModelConfig, source: str | Path | None, dtype: str) -> dict[str, Any]:
    """The config.json of a language model: `source`'s, if given and of the same model."""
    written = config.to_hf()
    if source is not None:
        written = load_hf_config(source)
        described = ModelConfig.from_hf(written)
        if described != config:
            raise ConversionError(
                f"source={source} describes another model than the parameters': {described}, "
                f"expected {config}"
            )
        written["architectures"] = config.to_hf()["architectures"]
    written.pop("torch_dtype", None)  # the older name of the same entry
    written["dtype"] = dtype
    return written


def _copy_files(source: Path, folder: Path) -> None:
    for name in _COPIED:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, folder / name)
        elif path.is_file():
            shutil.copyfile(path, folder / name)


def _check_fit(leaves: Mapping[tuple[str, ...], Any], table: Sequence[Weight]) -> None:
    """One error with everything that does not fit."""
    by_path = {weight.path: weight for weight in table}
    faults = [f"missing: {'.'.join(path)}" for path in by_path if path not in leaves]
    for path, leaf in leaves.items():
        shape = tuple(np.shape(leaf))
        if path not in by_path:
            faults.append(f"unexpected: {'.'.join(path)} {list(shape)}")
        elif shape != by_path[path].full_shape:
            expected = list(by_path[path].full_shape)
            faults.append(f"wrong shape: {'.'.join(path)} {list(shape)}, expected {expected}")
    if faults:
        listed = "\n  ".join(faults)
        raise ConversionError(f"the parameters do not fit the config:\n  {listed}")


def _hf_tensor(weight: Weight, leaf: Any, layer: int) -> np.ndarray:
    return weight.to_hf(_fetched(weight, leaf, layer, box_of(weight.shape)))


def _hf_pieces(weight: Weight, leaf: Any, layer: int) -> Iterator[Piece]:
    """One layer, in pieces that are long stretches of the file, or whole chunks of a checkpoint."""
    unit = unit_of(leaf)
    order = [weight.order.index(axis) for axis in range(len(weight.split))]
    own = unit[1:] if unit and weight.stacked else unit
    most = (CHUNK_BYTES if unit else PIECE_BYTES) // 4
    for box in pieces(weight.shape, order, most, own):
        array = _fetched(weight, leaf, layer, box)
        yield Piece(weight.split, tuple(box[axis] for axis in order), array.transpose(order))


def _fetched(weight: Weight, leaf: Any, layer: int, box: Box) -> np.ndarray:
    # Cut before it leaves the device: a stacked leaf can be a large part of the model.
    return fetch(leaf, ((layer, layer + 1), *box))[0] if weight.stacked else fetch(leaf, box)


def _leaves(
    tree: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value
