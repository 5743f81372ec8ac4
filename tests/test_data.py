"""Rows from real files, prompts through real tokenizers, and a cursor that goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl.config import DataConfig, SourceConfig
from jaxrl.data import (
    PromptCursor,
    build_prompts,
    cut,
    load_prompts,
    load_rows,
    load_tokenizer,
)
from jaxrl.errors import CheckpointError, DataError
from jaxrl.types import Prompt

SMOLLM2 = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = ["<s>", "</s>", "<unk>", "[user]", "[system]", "[assistant]", "be", "kind", "a", "b", "c"]
BOS, UNK, USER, SYSTEM, ASSISTANT, BE, KIND, A, B, C = 0, 2, 3, 4, 5, 6, 7, 8, 9, 10


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Words split at white space; puts a BOS before plain text, as Llama's does."""
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def rows_of(path: Path, **settings: Any) -> list[dict[str, Any]]:
    return load_rows(SourceConfig(kind="file", path=str(path), **settings))


def build(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[Prompt]:
    return build_prompts(rows, tokenizer, DataConfig(**settings), vocab_size=len(WORDS))[0]


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


# --- prompts ---


def test_a_string_becomes_a_user_message_with_exactly_one_bos(tokenizer: Any) -> None:
    (prompt,) = build([{"prompt": "a b", "answer": "c", "n": 1}], tokenizer)
    assert prompt.ids == (BOS, USER, A, B, ASSISTANT)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(prompt.ids) == expected
    assert (prompt.row, prompt.text, prompt.columns) == (0, "a b", {"answer": "c", "n": 1})


def test_messages_and_the_system_message(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "kind"}, {"role": "user", "content": "a"}]
    for chat in (True, False):  # messages always need the template
        (prompt,) = build([{"prompt": messages}], tokenizer, chat=chat)
        assert prompt.ids == (BOS, SYSTEM, KIND, USER, A, ASSISTANT)
        assert prompt.text == "<s>[system] kind [user] a [assistant]"
    (prompt,) = build([{"prompt": "a"}], tokenizer, system="be kind")
    assert prompt.ids == (BOS, SYSTEM, BE, KIND, USER, A, ASSISTANT)


def test_plain_text_has_the_tokenizers_special_tokens_once(tokenizer: Any) -> None:
    prompts = build([{"q": "a b"}, {"q": "<s> a b"}], tokenizer, chat=False, prompt_column="q")
    assert prompts[0].ids == prompts[1].ids == (BOS, A, B)


def test_another_template_as_text_and_as_a_file(tokenizer: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }} c{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        assert build([{"prompt": "a"}], tokenizer, chat_template=given)[0].ids == (A, C)
    with pytest.raises(DataError, match="data.chat_template='gone.jinja' is neither"):
        build([{"prompt": "a"}], tokenizer, chat_template="gone.jinja")
    with pytest.raises(DataError, match="row 1 .*template refuses the prompt .*no systems"):
        refuse = "{{ raise_exception('no systems') }}"
        build([{"prompt": "a"}], tokenizer, chat_template=refuse)


def test_no_chat_template_says_what_to_do(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template; give one with data.chat_template, or"):
        build([{"prompt": "a"}], tokenizer)
    assert build([{"prompt": "a"}], tokenizer, chat=False)[0].ids == (BOS, A)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, r"row 2 \(index 1\): prompt=None must be a string or a list"),
        ({"prompt": 3}, r"row 2 \(index 1\): prompt=3 must be"),
        ({"question": "a", "answer": 1}, "row 2 .* no column 'prompt'; it has question, answer"),
        ({"prompt": []}, "row 2 .* empty list"),
        ({"prompt": ["a"]}, "row 2 .* 'a' is not a chat message"),
        ({"prompt": [{"content": "a"}]}, "row 2 .* is not a chat message"),
        ({"prompt": [{"role": "user", "content": None}]}, "row 2 .* user message has no content"),
        ({"prompt": "a", "completions": 1}, "row 2 .* column 'completions' .* rename it"),
    ],
)
def test_bad_rows_are_named(tokenizer: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build([{"prompt": "a"}, row], tokenizer)


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="row 1 .* has no tokens"):
        build([{"prompt": ""}], tokenizer, chat_template="{# nothing #}")


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("left", 6, [5, 6, 7, 8, 9, 10]),
        ("right", 6, [1, 2, 3, 4, 5, 6]),
        ("middle", 6, [1, 2, 3, 8, 9, 10]),
        ("middle", 5, [1, 2, 8, 9, 10]),
        ("middle", 1, [10]),
        ("left", 10, list(range(1, 11))),
        ("right", 11, list(range(1, 11))),
    ],
)
def test_cut(side: Any, limit: int, kept: list[int]) -> None:
    assert cut(range(1, 11), limit, side) == kept


def test_overlong_prompts_are_dropped_cut_or_refused_and_counted(tokenizer: Any) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a b c"}, {"prompt": "b"}]  # 4, 6 and 4 tokens

    def built(overlong: Any) -> tuple[list[tuple[int, tuple[int, ...]]], dict[str, int]]:
        data = DataConfig(max_prompt_tokens=4, overlong=overlong)
        prompts, counts = build_prompts(rows, tokenizer, data, vocab_size=len(WORDS))
        return [(p.row, p.ids) for p in prompts], counts

    first, last = (0, (BOS, USER, A, ASSISTANT)), (2, (BOS, USER, B, ASSISTANT))
    assert built("drop") == ([first, last], {"rows": 3, "dropped": 1, "cut": 0})
    counts = {"rows": 3, "dropped": 0, "cut": 1}
    assert built("left") == ([first, (1, (A, B, C, ASSISTANT)), last], counts)
    assert built("right") == ([first, (1, (BOS, USER, A, B)), last], counts)
    assert built("middle") == ([first, (1, (BOS, USER, C, ASSISTANT)), last], counts)
    with pytest.raises(DataError, match=r"row 2 .* 6 tokens and data.max_prompt_tokens=4"):
        built("error")
    with pytest.raises(DataError, match="all 3 prompts are longer than data.max_prompt_tokens=3"):
        build(rows, tokenizer, max_prompt_tokens=3)


def test_tokens_outside_the_models_vocabulary_stop_the_run(tokenizer: Any) -> None:
    build_prompts([{"prompt": "a"}], tokenizer, DataConfig(), vocab_size=11)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(DataError, match=r"token '\[PAD\]' has id 11 >= vocab_size 11"):
        build_prompts([{"prompt": "a"}], tokenizer, DataConfig(), vocab_size=11)
    build_prompts([{"prompt": "a"}], tokenizer, DataConfig(), vocab_size=12)


def test_equal_prompts_stay_different_rows_and_messages_name_the_file(
    tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": 0}\n{"prompt": "a", "answer": 1}\n')
    source = SourceConfig(kind="file", path=str(file))
    prompts, counts = load_prompts(source, tokenizer, DataConfig(), vocab_size=11)
    assert [(p.row, p.columns["answer"]) for p in prompts] == [(0, 0), (1, 1)]
    assert counts == {"rows": 2, "dropped": 0, "cut": 0}
    file.write_text('{"prompt": "a"}\n{"prompt": null}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, row 2 \(index 1\): prompt=None"):
        load_prompts(source, tokenizer, DataConfig(), vocab_size=11)


# --- tokenizers from folders ---


def test_tokenizer_folders_described_and_plain(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "described")
    loaded = load_tokenizer(tmp_path / "described")
    assert build([{"prompt": "a b"}], loaded)[0].ids == (BOS, USER, A, B, ASSISTANT)
    (tmp_path / "plain").mkdir()
    tokenizer.backend_tokenizer.save(str(tmp_path / "plain" / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "plain")
    assert build([{"prompt": "a b"}], loaded, chat=False)[0].ids == (BOS, A, B)


def test_folders_without_a_readable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "gone")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Nonsense"}))
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_smollm2s_own_template_and_tokenizer() -> None:
    loaded = load_tokenizer(SMOLLM2)
    rows = [{"prompt": "What is 7 + 5?", "answer": 12}]
    (prompt,), _ = build_prompts(rows, loaded, DataConfig(), vocab_size=49152)
    text = loaded.decode(prompt.ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n")
    (briefer,), _ = build_prompts(rows, loaded, DataConfig(system="Be brief."), vocab_size=49152)
    assert loaded.decode(briefer.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


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
