"""From rows to tokenised prompts, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrl.config import DataConfig
from jaxrl.errors import DataError
from jaxrl.types import Prompt

__all__ = ["build_prompts", "chat_template", "cut", "load_tokenizer"]

_RESERVED = ("prompts", "completions", "completion_ids")


def load_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer in `folder`, which may hold nothing but a tokenizer.json.

    Raises:
        DataError: There is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    described = (folder / "tokenizer_config.json").exists()
    plain = folder / "tokenizer.json"
    if not described and not plain.exists():
        raise DataError(
            f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json); "
            "copy the files that belong to the model into it"
        )
    try:
        if not described:
            return PreTrainedTokenizerFast(tokenizer_file=str(plain))
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise DataError(f"the tokenizer in {folder} cannot be read: {error}") from error


def build_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    data: DataConfig,
    *,
    vocab_size: int,
    where: str = "data",
) -> tuple[list[Prompt], dict[str, int]]:
    """Tokenise `rows` once, in order.

    A list of messages, and with `data.chat` a string as a user message, goes through the chat
    template, whose tokens are taken as they are. Any other string is encoded with the tokenizer's
    own special tokens, unless it already begins with the beginning-of-sequence token. A prompt
    longer than `data.max_prompt_tokens` is dealt with as `data.overlong` says.

    Args:
        rows: Columns by name; `data.prompt_column` has the prompt.
        tokenizer: From `load_tokenizer`.
        data: The settings.
        vocab_size: Rows of the model's embedding.
        where: What to call the rows in messages, e.g. their file.

    Returns:
        The prompts, and how many rows there were, were dropped, and were cut short
        (keys rows, dropped, cut).

    Raises:
        DataError: A missing, null or unusable prompt (with its row number), no chat template, token
            ids outside the model's vocabulary, or nothing left.
    """
    _check_vocabulary(tokenizer, vocab_size)
    template = chat_template(data)
    prompts: list[Prompt] = []
    counts = {"rows": len(rows), "dropped": 0, "cut": 0}
    for index, row in enumerate(rows):
        place = f"{where}, row {index + 1} (index {index})"
        prompt = _prompt_of(row, data.prompt_column, place)
        messages = _messages(prompt, data)
        ids, text = _encode(prompt, messages, tokenizer, template, place)
        if len(ids) > data.max_prompt_tokens:
            if data.overlong == "error":
                raise DataError(
                    f"{place}: the prompt has {len(ids)} tokens and data.max_prompt_tokens="
                    f"{data.max_prompt_tokens}; raise the limit, or set data.overlong to drop, "
                    "left, right or middle"
                )
            if data.overlong == "drop":
                counts["dropped"] += 1
                continue
            counts["cut"] += 1
            ids = cut(ids, data.max_prompt_tokens, data.overlong)
        columns = {name: value for name, value in row.items() if name != data.prompt_column}
        for name in _RESERVED:
            if name in columns:
                raise DataError(
                    f"{place}: the column {name!r} has a name that reward functions are called "
                    "with; rename it"
                )
        prompts.append(
            Prompt(row=index, ids=tuple(ids), text=text, messages=messages, columns=columns)
        )
    if not prompts:
        raise DataError(
            f"{where}: all {len(rows)} prompts are longer than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}; raise it"
        )
    return prompts, counts


def cut(ids: Sequence[int], limit: int, side: Literal["left", "right", "middle"]) -> list[int]:
    """At most `limit` of `ids`, tokens taken away at one side or in the middle.

    >>> cut(range(1, 11), 6, "left"), cut(range(1, 11), 5, "middle")
    ([5, 6, 7, 8, 9, 10], [1, 2, 8, 9, 10])
    """
    ids = list(ids)
    if len(ids) <= limit:
        return ids
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer's token {token!r} has id {largest} >= vocab_size {vocab_size} of the "
            "model; use the tokenizer that belongs to the model, or take added tokens out of it"
        )


def chat_template(data: DataConfig) -> str | None:
    """The template that replaces the tokenizer's: itself, or the text of the file that is named."""
    given = data.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"data.chat_template={given!r} is neither a Jinja template nor a readable file: {error}"
        ) from error


def _prompt_of(row: Mapping[str, Any], column: str, place: str) -> str | list[Any]:
    if column not in row:
        raise DataError(
            f"{place}: there is no column {column!r}; it has {', '.join(map(str, row))}; "
            "set data.prompt_column to one of them"
        )
    prompt = row[column]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise DataError(
            f"{place}: {column}={prompt!r} must be a string or a list of chat messages; "
            "correct the row or take it out"
        )
    for message in prompt:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise DataError(
                f"{place}: {message!r} is not a chat message; it needs role and content"
            )
        if message.get("content") is None:
            raise DataError(f"{place}: the {message['role']} message has no content; give it some")
    if not prompt:
        raise DataError(f"{place}: {column} is an empty list; it needs at least one chat message")
    return prompt


def _messages(prompt: str | list[Any], data: DataConfig) -> tuple[Mapping[str, Any], ...]:
    """The chat behind a prompt; none where it is plain text."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if not data.chat:
        return ()
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    return (*system, {"role": "user", "content": prompt})


def _encode(
    prompt: str | list[Any],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template: str | None,
    place: str,
) -> tuple[list[int], str]:
    if isinstance(prompt, str) and not messages:
        begun = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids, text = tokenizer(prompt, add_special_tokens=not begun)["input_ids"], prompt
    else:
        if template is None and not tokenizer.chat_template:
            raise DataError(
                f"{place}: the tokenizer has no chat template; give one with data.chat_template, "
                "or take plain text with data.chat=false and string prompts"
            )
        try:
            rendered = tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise DataError(f"{place}: the chat template refuses the prompt ({error})") from error
        # The template writes its own special tokens; the tokenizer must not add them again.
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        text = prompt if isinstance(prompt, str) else rendered
    if not ids:
        raise DataError(
            f"{place}: the prompt has no tokens; a model needs at least one to go on from"
        )
    return list(ids), text
