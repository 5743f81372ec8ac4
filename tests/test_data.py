"""Rows from real files and functions, and a cursor that goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import SourceConfig
from jaxrl.data import (
    PromptCursor,
    load_rows,
)
from jaxrl.errors import CheckpointError, DataError
from jaxrl.types import Prompt


def rows_of(path: Path, **settings: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(kind="file", path=str(path), **settings))


# --- rows ---


def test_jsonl_is_split_at_newlines_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d", "n": [1]}\n  \n'.encode())
    assert rows_of(file) == [{"prompt": "a\u2028b\x85c"}, {"prompt": "d", "n": [1]}]


def test_jsonl_with_a_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}')
    assert [row["prompt"] for row in rows_of(file)] == ["a", "b"]
    assert [row["prompt"] for row in rows_of(file, size=1)] == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', r"rows.jsonl, line 3: not JSON"),
        (b'{"prompt": "a"}\n[1, 2]\n', r"rows.jsonl, line 2: must be an object .* list"),
        (b'{"prompt": "\xff"}\n', r"rows.jsonl, line 1: not JSON .*utf-8"),
        (b"", "rows.jsonl holds no rows"),
        (b"\n\n", "rows.jsonl holds no rows"),
    ],
)
def test_bad_jsonl_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / "rows.jsonl")


def test_missing_files_other_suffixes_and_misplaced_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.jsonl does not exist"):
        rows_of(tmp_path / "gone.jsonl")
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match="rows.csv must end in .jsonl or .parquet"):
        rows_of(tmp_path / "rows.csv")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="split='train' .* only dataset folders"):
        rows_of(tmp_path / "rows.jsonl", split="train")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": "a", "n": 1, "tags": ["x"]}, {"prompt": "b", "n": None, "tags": []}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.parquet") == rows
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="bad.parquet is not a readable parquet file"):
        rows_of(tmp_path / "bad.parquet")


def test_saved_dataset_folders(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(str(tmp_path / "one"))
    assert rows_of(tmp_path / "one") == rows
    with pytest.raises(DataError, match="has no splits; set split to null"):
        rows_of(tmp_path / "one", split="train")
    both = datasets.DatasetDict({"train": one, "test": one.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert rows_of(tmp_path / "both", split="test") == rows[1:]
    with pytest.raises(DataError, match="no split was given; it has the splits test, train"):
        rows_of(tmp_path / "both")
    with pytest.raises(DataError, match="split='tset' was given; it has the splits test, train"):
        rows_of(tmp_path / "both", split="tset")


def test_dataset_folders_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert rows_of(folder) == [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing is not a readable dataset folder"):
        rows_of(tmp_path / "nothing")


def test_reasoning_gym_rows_hold_what_its_scorer_needs() -> None:
    from jaxrl.reward_functions import reasoning_gym_score

    source = SourceConfig(
        kind="reasoning_gym",
        name="chain_sum",
        size=3,
        seed=5,
        params={"min_terms": 2, "max_terms": 2},
    )
    rows = load_rows(source)
    assert len(rows) == 3 and load_rows(source) == rows
    assert rows != load_rows(SourceConfig(**(vars(source) | {"seed": 6})))
    assert all(row["prompt"] == row["question"] for row in rows)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    answers = [row["answer"] for row in rows]
    assert reasoning_gym_score(completions=answers, prompts=answers, **columns) == [1.0] * 3


@pytest.mark.parametrize(
    ("name", "params"),
    [("chain_summ", {}), ("chain_sum", {"min_termz": 2})],
    ids=["name", "params"],
)
def test_unknown_generators_and_parameters_are_named(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"'{name}' with params .*({name}|min_termz)"):
        load_rows(SourceConfig(kind="reasoning_gym", name=name, size=1, params=params))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rows_module.py").write_text(
        "def count(n=2):\n    for i in range(n): yield {'prompt': f'p{i}'}\n"
        "def endless():\n    while True: yield {'prompt': 'p'}\n"
        "def fails():\n    yield {'prompt': 'p'}\n    raise KeyError('oh')\n"
        "def words(): return ['a']\n"
        "def none(): return []\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rows_module"
    sys.modules.pop("my_rows_module", None)


def test_rows_from_a_function(module: str) -> None:
    def rows(function: str, **settings: Any) -> list[dict[str, Any]]:
        return load_rows(SourceConfig(kind="python", name=f"{module}:{function}", **settings))

    assert rows("count") == [{"prompt": "p0"}, {"prompt": "p1"}]
    assert len(rows("count", params={"n": 5})) == 5
    assert len(rows("count", params={"n": 5}, size=3)) == 3
    assert len(rows("endless", size=4)) == 4
    for function, message in {
        "fails": "KeyError: 'oh'",
        "words": "row 1 is str, not a dict",
        "none": "holds no rows",
        "missing": "has nothing called missing",
    }.items():
        with pytest.raises(DataError, match=f"{module}:{function}.*{message}"):
            rows(function)
    with pytest.raises(DataError, match="params {'m': 3} failed: TypeError"):
        rows("count", params={"m": 3})
    with pytest.raises(DataError, match="'no_such_mod:f' cannot be imported"):
        load_rows(SourceConfig(kind="python", name="no_such_mod:f"))


# --- cursor ---


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(row=i, ids=(i, 1), text=str(i), columns={}) for i in range(count)]


def taken(cursor: PromptCursor, count: int) -> list[int]:
    return [prompt.row for prompt in cursor.take(count)]


def test_every_epoch_is_a_permutation_of_its_own_fixed_by_the_seed() -> None:
    def epochs(seed: int) -> tuple[list[int], list[int]]:
        cursor = PromptCursor(prompts_of(20), seed=seed)
        return taken(cursor, 20), taken(cursor, 20)

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second and first != list(range(20)) != second
    assert epochs(1) == (first, second)
    assert epochs(2)[0] != first


def test_without_shuffling_rows_come_in_order() -> None:
    assert taken(PromptCursor(prompts_of(3), seed=1, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_batches_cross_epochs_without_losing_prompts() -> None:
    cursor = PromptCursor(prompts_of(5), seed=3)
    rows = [row for _ in range(5) for row in taken(cursor, 3)]
    whole = PromptCursor(prompts_of(5), seed=3)
    assert rows == taken(whole, 15)
    assert (cursor.state()["epoch"], cursor.state()["position"]) == (2, 5)
    for start in (0, 5, 10):
        assert sorted(rows[start : start + 5]) == list(range(5))


def test_prompts_carry_the_epoch_they_are_taken_in() -> None:
    batch = PromptCursor(prompts_of(3), seed=0).take(8)
    assert [prompt.epoch for prompt in batch] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_fewer_prompts_than_a_batch_are_all_used() -> None:
    rows = taken(PromptCursor(prompts_of(3), seed=0), 8)
    assert len(rows) == 8 and sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2]


@pytest.mark.parametrize("before", [0, 1, 4, 5, 6, 10, 13])
def test_a_restored_cursor_goes_on_as_if_nothing_had_happened(before: int) -> None:
    whole = PromptCursor(prompts_of(5), seed=9)
    expected = taken(whole, before + 12)[before:]
    stopped = PromptCursor(prompts_of(5), seed=9)
    taken(stopped, before)
    state = json.loads(json.dumps(stopped.state()))
    resumed = PromptCursor(prompts_of(5), seed=9)
    taken(resumed, 7)  # wherever it was
    resumed.restore(state)
    assert taken(resumed, 12) == expected
    assert all(type(value) is int for value in state.values())


def test_other_prompts_are_not_resumed() -> None:
    state = PromptCursor(prompts_of(5), seed=0).state()
    with pytest.raises(CheckpointError, match="5 of them, now 4"):
        PromptCursor(prompts_of(4), seed=0).restore(state)
    with pytest.raises(CheckpointError, match="other prompts"):
        PromptCursor(prompts_of(5)[::-1], seed=0).restore(state)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        PromptCursor([], seed=0)
