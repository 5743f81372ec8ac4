"""Hugging Face folders in: config and weights, read tensor by tensor from safetensors.

Every name, shape and layout comes from `jaxrl.models.weights`. Nothing is filled in silently: a
checkpoint that does not fit the config exactly is refused with the full list of what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (makes numpy, and so safetensors, know bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.checkpoint.hf_files import INDEX_NAME, WEIGHTS_NAME
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig, Weight, weight_table

_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
_FLOATS = ("F32", "BF16", "F16", "F64")
# Tensors that older libraries store although they follow from the config.
_COMPUTED = ("rotary_emb.inv_freq",)


class HasVocabulary(Protocol):
    """The one thing asked of a tokenizer here."""

    def get_vocab(self) -> Mapping[str, int]:
        """Token -> id, added tokens included."""
        ...


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file: what its header says, and how to read it."""

    file: Path
    handle: Any
    shape: tuple[int, ...]
    dtype: str

    def read(self, name: str) -> np.ndarray:
        try:
            return self.handle.get_tensor(name)
        except SafetensorError as error:
            raise ConversionError(f"{self.file}: cannot read {name}: {error}") from error


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
    return _json_object(path)


def load_params(
    folder: str | Path, config: ModelConfig, *, with_head: bool = True, dtype: str = "float32"
) -> dict[str, Any]:
    """Reads a model's weights into the nested dict that `jaxrl.models.Model` takes.

    One tensor is read at a time, straight into its place in the stacked arrays, so the peak is
    about one copy of the parameters.

    Args:
        folder: A Hugging Face model folder: `model.safetensors`, or shards with their index.
        config: The model to read; usually `ModelConfig.from_hf(load_hf_config(folder))`.
        with_head: False leaves out an untied output head, e.g. for the trunk of a critic.
        dtype: Of the arrays returned; float32, bfloat16 and float16 files can be read.

    Returns:
        A nested dict of numpy arrays, layers stacked on a leading axis.

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
    )


def read_weights(
    folder: str | Path,
    table: Sequence[Weight],
    *,
    dtype: str,
    spare: Collection[str] = (),
    tied: bool = False,
) -> dict[str, Any]:
    """Reads the weights of `table`, and insists that the folder holds these and no others.

    Args:
        folder: See `load_params`.
        table: What to read.
        dtype: Of the arrays returned, a value head's aside: that is float32 everywhere.
        spare: Names that may be in the folder besides, and are not read.
        tied: Whether an output head, if there is one, must equal the embedding.

    Raises:
        ConversionError: See `load_params`.
    """
    params: dict[str, Any] = {}
    with _stored_tensors(Path(folder)) as stored:
        _check(Path(folder), table, stored, spare)
        if tied and _HEAD in stored:
            _check_tied(Path(folder), stored)
        for weight in table:
            kept = "float32" if weight.path[0] == "value_head" else dtype
            array = np.empty(weight.full_shape, np.dtype(kept))
            for layer, name in enumerate(weight.hf_names()):
                target = array[layer] if weight.stacked else array
                target[...] = weight.from_hf(stored[name].read(name))
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
    folder: Path, table: Sequence[Weight], stored: Mapping[str, _Stored], spare: Collection[str]
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
        elif found.dtype not in _FLOATS:
            faults.append(f"wrong type: {name} {found.dtype}, expected one of {', '.join(_FLOATS)}")
    if faults:
        hint = ""
        if f"missing: {_HEAD}" in faults:
            hint = "\n(without an output head the config must say tie_word_embeddings: true)"
        listed = "\n  ".join(faults)
        raise ConversionError(
            f"{folder} does not hold the weights its config asks for; {len(faults)} tensor(s):\n"
            f"  {listed}{hint}"
        )


def _check_tied(folder: Path, stored: Mapping[str, _Stored]) -> None:
    head, embed = stored[_HEAD].read(_HEAD), stored[_EMBED].read(_EMBED)
    if head.shape != embed.shape or not np.array_equal(head, embed):
        raise ConversionError(
            f"{folder}: config says tie_word_embeddings: true, but {_HEAD} {list(head.shape)} is "
            f"not equal to {_EMBED} {list(embed.shape)}. One of them would be lost: set "
            f"tie_word_embeddings: false in config.json to keep both, or remove {_HEAD}"
        )


@contextmanager
def _stored_tensors(folder: Path) -> Iterator[dict[str, _Stored]]:
    """Opens the folder's safetensors files and gives all tensors by name, unread."""
    stored: dict[str, _Stored] = {}
    with ExitStack() as stack:
        for path in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ConversionError(
                    f"{path} is cut short or is no safetensors file ({error}); fetch it again"
                ) from error
            for name in handle.keys():
                if name in stored:
                    raise ConversionError(f"{name} is both in {stored[name].file} and in {path}")
                part = handle.get_slice(name)
                stored[name] = _Stored(path, handle, tuple(part.get_shape()), part.get_dtype())
        yield stored


def _weight_files(folder: Path) -> list[Path]:
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
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index} has no weight_map; fetch it again")
    files = sorted({folder / name for name in weight_map.values()})
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        raise ConversionError(f"{index} names files that are missing: {', '.join(absent)}")
    return files


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _put(tree: dict[str, Any], path: tuple[str, ...], value: np.ndarray) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
