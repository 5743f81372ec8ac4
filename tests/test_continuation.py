"""What stands between two turns: the template's difference, and templates that have none."""

from __future__ import annotations

import pytest
from playing import EOS, TEMPLATE, TOKENIZER, encode

from jaxrl.config import DataConfig
from jaxrl.continuation import Continuation
from jaxrl.prompts import build_prompts
from jaxrl.types import Prompt


def rows_of(template: str) -> list[Prompt]:
    data = DataConfig(chat_template=template)
    rows = [{"prompt": "3 plus 4"}]
    return build_prompts(rows, TOKENIZER, data, vocab_size=512)[0]


FORGETFUL = (  # only the last exchange
    "{% for m in messages[-2:] %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
REWRITING = (  # thinking stands in the last turn alone
    "{% for m in messages %}<bos>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}thinking\n{% endif %}{{ m.content }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
COUNTING = (  # marks all turns once there are two
    "{% set said = messages | selectattr('role', 'equalto', 'assistant') | list | length %}"
    "{% for m in messages %}<bos>{% if said > 1 %}*{% endif %}{{ m.role }}\n{{ m.content }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
USERS_ONLY = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FORGETFUL, "changes"),
        (REWRITING, "changes"),
        (COUNTING, "changes earlier turns when another one follows"),
        (SILENT, "leaves the assistant's content out"),
    ],
)
def test_templates_that_cannot_be_extended_are_found_at_the_start(template: str, said: str):
    with pytest.raises(ValueError, match=f"row 0: the chat template cannot go on.*{said}"):
        Continuation(TOKENIZER, template).check(rows_of(template))


def test_a_template_without_tools_goes_on_with_users():
    continuation = Continuation(TOKENIZER, USERS_ONLY)
    prompts = rows_of(USERS_ONLY)
    continuation.check(prompts)
    chat = [*prompts[0].messages, {"role": "assistant", "content": "7"}]
    user = continuation.between(chat, {"role": "user", "content": "and"}, EOS, stopped=True)
    assert user == encode("\n<bos>user\nand<eos>\n<bos>assistant\n")
    with pytest.raises(ValueError, match="no tools"):
        continuation.between(chat, {"role": "tool", "content": "and"}, EOS, stopped=True)


def test_only_the_end_of_the_turn_counts_as_written():
    """Another stop token that stands somewhere behind it is not what the policy wrote."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "7"}]
    message = {"role": "tool", "content": "ok"}
    (newline,) = encode("\n")
    continuation = Continuation(TOKENIZER, TEMPLATE)
    whole = encode("<eos>\n<bos>tool\nok<eos>\n<bos>assistant\n")
    assert continuation.between(chat, message, newline, stopped=True) == whole
    assert continuation.between(chat, message, EOS, stopped=True) == whole[1:]
    assert continuation.between(chat, message, EOS, stopped=False) == whole
    spaced = Continuation(TOKENIZER, TEMPLATE.replace("<eos>", "\n<eos>"))
    after = encode("\n<bos>tool\nok\n<eos>\n<bos>assistant\n")
    assert spaced.between(chat, message, EOS, stopped=True) == after


def test_the_message_may_hold_what_ends_a_turn():
    """Only the stop token that closes the policy's turn is dropped."""
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "7"}]
    bare = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    message = {"role": "tool", "content": "a<eos>b"}
    kept = Continuation(TOKENIZER, bare).between(chat, message, EOS, stopped=True)
    assert kept == encode("\ntool:a<eos>b\n")
    ended = Continuation(TOKENIZER, TEMPLATE).between(chat, message, EOS, stopped=True)
    assert ended == encode("\n<bos>tool\na<eos>b<eos>\n<bos>assistant\n")
