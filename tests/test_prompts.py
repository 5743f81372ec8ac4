"""Prompts through real tokenizers and chat templates: ids, limits, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl.config import DataConfig, SourceConfig
from jaxrl.data import (
    build_prompts,
    cut,
    load_prompts,
    load_tokenizer,
)
from jaxrl.errors import DataError
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


def build(rows: list[dict[str, Any]], tokenizer: Any, **settings: Any) -> list[Prompt]:
    return build_prompts(rows, tokenizer, DataConfig(**settings), vocab_size=len(WORDS))[0]


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
