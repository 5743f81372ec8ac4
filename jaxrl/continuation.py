"""Token ids between two turns of an episode: what follows a response, up to the next generation.

Nothing that was sampled is ever tokenised again. The chat template is asked what it would put
behind the assistant's content when another message follows: a placeholder stands for the content,
and the text behind it is tokenised. A template may not change what stands before it when the chat
grows, since the ids before are kept as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.errors import DataError
from jaxrl.types import Prompt

__all__ = ["Continuation"]

Message = Mapping[str, Any]
_MARK = "assistant-content-0f3c"
"""Stands for an assistant's content; no template has it."""


class Continuation:
    """Extends episodes under one tokenizer and template."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        """Make it.

        Args:
            tokenizer: the model's.
            template: replaces the tokenizer's own, if given.
        """
        self._tokenizer, self._template = tokenizer, template
        self._lock = threading.Lock()  # a fast tokenizer may not be borrowed by two threads

    def check(self, prompts: Sequence[Prompt]) -> None:
        """See that the chats of `prompts` can be continued by a user or a tool, twice.

        Raises:
            DataError: the template refuses, or changes earlier turns; names the row.
        """
        for prompt in prompts:
            if not prompt.messages:
                continue
            faults = {role: self._fault(prompt.messages, role) for role in ("user", "tool")}
            if all(faults.values()):
                listed = "; ".join(f"{role}: {fault}" for role, fault in faults.items())
                raise DataError(
                    f"row {prompt.row}: the chat template cannot go on after an assistant's turn "
                    f"({listed}); rollout.env needs one that leaves earlier turns as they are: "
                    "give it with data.chat_template"
                )

    def text_of(self, ids: Sequence[int]) -> str:
        """A turn as text without special tokens, for the environment to read."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def between(
        self, chat: Sequence[Message], message: Message, last: int, *, stopped: bool
    ) -> tuple[int, ...]:
        """Ids between a response and the next one.

        Args:
            chat: messages up to the policy's last turn, which is one of them; empty for a prompt of
                plain text, after which the message's content follows as it is.
            message: what the environment says.
            last: the response's last token.
            stopped: whether that is a stop token. If the template ends an assistant's turn with it
                too, it is not there twice; all else that the template puts there is kept.

        Raises:
            DataError: the template refuses these messages, or changes earlier turns.
        """
        if not chat:
            return tuple(self._encode(message["content"]))
        closing, tail = self._split(chat, message)
        ids, closing_ids = self._encode(tail), self._encode(closing)
        if stopped and last in closing_ids:
            # A template may put a line break between the content and its end.
            written = closing_ids.index(last) + 1
            blank = not self._tokenizer.decode(closing_ids[: written - 1]).strip()
            if blank and ids[:written] == closing_ids[:written]:
                ids = ids[written:]
        return tuple(ids)

    def _split(self, chat: Sequence[Message], message: Message) -> tuple[str, str]:
        """Text behind the last turn's content: without `message`, and with it and the header."""
        marked = [*chat[:-1], {**chat[-1], "content": _MARK}]
        alone = self._render(marked, header=False)
        longer = self._render([*marked, message], header=True)
        before, mark, closing = alone.partition(_MARK)
        before_too, mark_too, tail = longer.partition(_MARK)
        if not (mark and mark_too):
            raise DataError("the template leaves the assistant's content out")
        if before != before_too:
            raise DataError(
                f"the template changes what stands before a turn when a {message['role']} message "
                f"follows it: {before[-60:]!r} becomes {before_too[-60:]!r}"
            )
        return closing, tail

    def _fault(self, messages: Sequence[Message], role: str) -> str:
        """What is wrong with two answers of `role`, if anything."""
        turn = {"role": "assistant", "content": "An earlier turn."}
        answer = {"role": role, "content": "An answer."}
        chat = [*messages, turn]
        try:
            self._split(chat, answer)
            once = self._render([*chat, answer], header=True)
            self._split([*chat, answer, turn], answer)
            twice = self._render([*chat, answer, turn, answer], header=True)
            if not once.startswith(self._render(messages, header=True)):
                raise DataError("it changes the prompt when a turn follows it")
            if not twice.startswith(once):
                raise DataError("it changes earlier turns when another one follows")
        except DataError as error:
            return str(error)
        return ""

    def _render(self, messages: Sequence[Message], *, header: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=header,
            )
        except Exception as error:
            raise DataError(f"the chat template refuses the messages ({error})") from error

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
