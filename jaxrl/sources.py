"""Rows of prompts from files, dataset folders, generators and functions; every row a plain dict."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.config import SourceConfig
from jaxrl.errors import DataError
from jaxrl.named_function import load_function

__all__ = ["load_rows"]


def load_rows(source: SourceConfig) -> list[dict[str, Any]]:
    """All rows of `source`, in its own order, at most `source.size` of them.

    Raises:
        DataError: The file is missing, empty or not what it claims to be (with the line number), or
            the generator or function cannot be found or fails.
    """
    if source.kind == "file":
        rows = _file_rows(Path(source.path or ""), source.split)
    elif source.kind == "reasoning_gym":
        rows = _generated_rows(source)
    else:
        rows = _function_rows(source)
    found = list(itertools.islice(rows, source.size))
    if not found:
        raise DataError(f"{_name(source)} holds no rows; at least one is needed")
    return found


def _name(source: SourceConfig) -> str:
    return str(source.path if source.kind == "file" else source.name)


def _file_rows(path: Path, split: str | None) -> Iterator[dict[str, Any]]:
    if not path.exists():
        raise DataError(
            f"{path} does not exist; give a .jsonl or .parquet file, or a dataset folder"
        )
    if path.is_dir():
        yield from _folder_rows(path, split)
    elif split is not None:
        raise DataError(
            f"split={split!r} was asked of {path}, but only dataset folders have splits"
        )
    elif path.suffix == ".jsonl":
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise DataError(f"{path} must end in .jsonl or .parquet, or be a dataset folder")


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    # Bytes are split at \n alone: str.splitlines would also cut at U+2028 and U+0085 within a text.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number}: must be an object with columns, "
                    f"got {type(row).__name__}: {str(row)[:60]}"
                )
            yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error})") from error


def _folder_rows(path: Path, split: str | None) -> Iterator[dict[str, Any]]:
    import datasets

    saved = any((path / name).exists() for name in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:
        raise DataError(f"{path} is not a readable dataset folder ({error})") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = sorted(map(str, loaded))
        chosen = splits[0] if split is None and len(splits) == 1 else split
        if chosen not in splits:
            given = "no split" if split is None else f"split={split!r}"
            raise DataError(f"{path}: {given} was given; it has the splits {', '.join(splits)}")
        loaded = loaded[chosen]
    elif split is not None:
        raise DataError(f"{path} has no splits; set split to null (given {split!r})")
    return (dict(row) for row in loaded)


def _generated_rows(source: SourceConfig) -> Iterator[dict[str, Any]]:
    """Entries of a reasoning_gym dataset, `prompt` beside question, answer and metadata."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"kind=reasoning_gym needs the package reasoning_gym ({error}); "
            "install it with pip install 'jaxrl[tasks]'"
        ) from error
    try:
        dataset = reasoning_gym.create_dataset(
            str(source.name), size=source.size, seed=source.seed, **source.params
        )
    except Exception as error:
        raise DataError(
            f"reasoning_gym cannot make the dataset {source.name!r} with params {source.params}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for entry in dataset:
        yield {"prompt": entry["question"], **entry}


def _function_rows(source: SourceConfig) -> Iterator[dict[str, Any]]:
    try:
        function = load_function(str(source.name))
    except ImportError as error:
        raise DataError(f"the source {source.name!r} cannot be imported: {error}") from error
    try:
        for index, row in enumerate(function(**source.params)):
            if not isinstance(row, dict):
                raise TypeError(f"row {index + 1} is {type(row).__name__}, not a dict of columns")
            yield row
    except Exception as error:
        raise DataError(
            f"{source.name} with params {source.params} failed: {type(error).__name__}: {error}"
        ) from error
