"""Hugging Face folders in: config and weights, read from safetensors slice by slice.

Every name, shape and layout comes from `jaxrl.models.weights`. Nothing is filled in silently: a
checkpoint that does not fit the config exactly is refused with the full list of what is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrl.checkpoint.boxes import PIECE_BYTES, Box, box_of, moved, pieces, sizes
from jaxrl.checkpoint.hf_placed import local_boxes, on_devices, on_host
from jaxrl.checkpoint.hf_stored import FLOATS, StoredTensor, json_object, stored_tensors
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig, Weight, weight_table

_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
# Tensors that older libraries store although they follow from the config.
_COMPUTED = ("rotary_emb.inv_freq",)


class HasVocabulary(Protocol):
    """The one thing asked of a tokenizer here."""

    def get_vocab(self) -> Mapping[str, int]:
        """Token -> id, added tokens included."""
        ...


def load_hf_config(folder: str | Path) -> dict[str, Any]:
    """Returns the parsed `config.json` of a model folder.

    Args:
        folder: A Hugging Face model folder.

    Raises:
        ConversionError: If the folder or its `config.json` is missing or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConversionError(
            f"{folder} is no folder; give the path of a Hugging Face model folder"
        )
    if not path.is_file():
        raise ConversionError(
            f"{folder} has no config.json, so it is no Hugging Face model folder; "
            "give the folder that holds config.json and the safetensors files"
        )
    return json_object(path)


def load_params(
    folder: str | Path,
    config: ModelConfig,
    *,
    with_head: bool = True,
    dtype: str = "float32",
    shardings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads a model's weights into the nested dict that `jaxrl.models.Model` takes.

    Large tensors are read in pieces, straight into their place, so that the peak is what is
    returned and about 100 MiB. With `shardings` what is returned lies on the devices, and each
    process reads only what its own devices hold.

    Args:
        folder: A Hugging Face model folder: `model.safetensors`, or shards with their index.
        config: The model to read; usually `ModelConfig.from_hf(load_hf_config(folder))`.
        with_head: False leaves out an untied output head, e.g. for the trunk of a critic.
        dtype: Of the arrays returned; float32, bfloat16 and float16 files can be read.
        shardings: A nested dict that has a NamedSharding for each parameter; None: numpy arrays.

    Returns:
        A nested dict of numpy or jax arrays, layers stacked on a leading axis.

    Raises:
        ConversionError: Listing all missing, unexpected, wrong-shape and wrong-type tensors; or
            naming the file that is missing, cut short or not safetensors.
    """
    table = [w for w in weight_table(config) if with_head or w.path[0] != "head"]
    tied = config.tie_word_embeddings
    return read_weights(
        folder,
        table,
        dtype=dtype,
        spare={_HEAD} if tied or not with_head else set(),
        tied=tied and with_head,
        shardings=shardings,
    )


def read_weights(
    folder: str | Path,
    table: Sequence[Weight],
    *,
    dtype: str,
    spare: Collection[str] = (),
    tied: bool = False,
    shardings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads the weights of `table`, and insists that the folder holds these and no others.

    Args:
        folder: See `load_params`.
        table: What to read.
        dtype: Of the arrays returned, a value head's aside: that is float32 everywhere.
        spare: Names that may be in the folder besides, and are not read.
        tied: Whether an output head, if there is one, must equal the embedding.
        shardings: See `load_params`.

    Raises:
        ConversionError: See `load_params`.
    """
    params: dict[str, Any] = {}
    with stored_tensors(Path(folder)) as stored:
        _check(Path(folder), table, stored, spare)
        if tied and _HEAD in stored:
            _check_tied(Path(folder), table, stored, shardings)
        for weight in table:
            kept = np.dtype("float32" if weight.path[0] == "value_head" else dtype)
            if shardings is None:
                array = on_host(weight, stored, kept)
            else:
                array = on_devices(weight, stored, kept, _at(shardings, weight.path))
            _put(params, weight.path, array)
    return params


def check_tokenizer_fits(tokenizer: HasVocabulary, config: ModelConfig) -> None:
    """Refuses a tokenizer that can produce an id outside the embedding table.

    An embedding table longer than the vocabulary is fine: many are padded.

    Args:
        tokenizer: Anything with `get_vocab()`.
        config: The model that is to read its ids.

    Raises:
        ConversionError: Naming the largest id, its token and the size of the table.
    """
    vocabulary = tokenizer.get_vocab()
    token = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[token] >= config.vocab_size:
        raise ConversionError(
            f"max tokenizer id {vocabulary[token]} ({token!r}) >= the model's vocab_size "
            f"{config.vocab_size}: ids outside the embedding table give garbage. Use the model's "
            "own tokenizer, or a model whose embeddings were resized for the added tokens"
        )


def _check(
    folder: Path,
    table: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    spare: Collection[str],
) -> None:
    """Raises one error with everything in which the files differ from the table."""
    wanted = {name: weight.hf_shape for weight in table for name in weight.hf_names()}
    faults = [f"missing: {name}" for name in wanted if name not in stored]
    for name, found in stored.items():
        if name not in wanted:
            if name not in spare and not name.endswith(_COMPUTED):
                faults.append(f"unexpected: {name} {list(found.shape)}")
        elif found.shape != wanted[name]:
            faults.append(f"wrong shape: {name} {list(found.shape)}, expected {list(wanted[name])}")
        elif found.dtype not in FLOATS:
            faults.append(f"wrong type: {name} {found.dtype}, expected one of {', '.join(FLOATS)}")
    if faults:
        hint = ""
        if f"missing: {_HEAD}" in faults:
            hint = "\n(without an output head the config must say tie_word_embeddings: true)"
        listed = "\n  ".join(faults)
        raise ConversionError(
            f"{folder} does not hold the weights its config asks for; {len(faults)} tensor(s):\n"
            f"  {listed}{hint}"
        )


def _check_tied(
    folder: Path,
    table: Sequence[Weight],
    stored: Mapping[str, StoredTensor],
    shardings: Mapping[str, Any] | None,
) -> None:
    """Compares, in pieces, what this process is about to read of the embedding with the head."""
    head, embed = stored[_HEAD], stored[_EMBED]
    weight = next(weight for weight in table if weight.hf_name == _EMBED)
    boxes = [box_of(embed.shape)]
    if shardings is not None:
        boxes = local_boxes(weight, _at(shardings, weight.path))
    same = head.dtype in FLOATS and head.shape == embed.shape
    if not same or not all(_same(head, embed, box) for box in boxes):
        raise ConversionError(
            f"{folder}: config says tie_word_embeddings: true, but {_HEAD} {list(head.shape)} is "
            f"not equal to {_EMBED} {list(embed.shape)}. One of them would be lost: set "
            f"tie_word_embeddings: false in config.json to keep both, or remove {_HEAD}"
        )


def _same(one: StoredTensor, other: StoredTensor, box: Box) -> bool:
    start = [begin for begin, _ in box]
    cut = pieces(sizes(box), range(len(box)), PIECE_BYTES // 4)
    parts = (moved(piece, start) for piece in cut)
    return all(np.array_equal(one.read(box=part), other.read(box=part)) for part in parts)


def _at(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
