"""What tests of episodes share: environments, a tokenizer with a template, scripted engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl.continuation import Continuation
from jaxrl.environment import Environment
from jaxrl.episodes import Stage, collect
from jaxrl.rollout.engine import LeftOut, check_request
from jaxrl.types import Prompt, Sampling, Trajectory
from tests.rollout.sglang.models import EOS, make_tokenizer

BOS = 1
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
TOKENIZER = make_tokenizer()
VOCAB = 512
STOPS = (EOS, *range(10, 500, 6))
"""Many: a random model would hardly ever say EOS."""
ASK = Sampling(max_new_tokens=40, stop_token_ids=STOPS)
SCRIPT = Sampling(max_new_tokens=80, stop_token_ids=(EOS, 10))


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def chat_prompt(row: int, question: str = "3 plus 4", **columns: Any) -> Prompt:
    """As `build_prompts` makes it of a string with this template."""
    messages = ({"role": "user", "content": question},)
    text = f"<bos>user\n{question}<eos>\n<bos>assistant\n"
    return Prompt(row=row, ids=encode(text), text=question, messages=messages, columns=columns)


def plain_prompt(row: int, text: str = "3 plus 4", **columns: Any) -> Prompt:
    return Prompt(row=row, ids=encode(text), text=text, columns=columns)


def stage_of(environment: Environment, max_turns: int = 8, turn: int | None = None) -> Stage:
    return Stage(environment, Continuation(TOKENIZER, TEMPLATE), max_turns, turn)


def spoken(messages: Sequence[Mapping[str, str]]) -> int:
    """Turns of the assistant so far."""
    return sum(message["role"] == "assistant" for message in messages)


async def over_at_once(*, messages: Any, text: str, **_: Any) -> tuple[None, float, bool]:
    return None, 0.5, True


async def counts(
    *, messages: list[dict[str, str]], text: str, turns: int = 3, say: str = "ok", **_: Any
) -> tuple[dict[str, str] | None, float, bool]:
    """Each turn is worth its number; the last one ends it."""
    turn = spoken(messages)
    return {"role": "tool", "content": say}, float(turn), turn == turns


async def odd(
    *, messages: list[dict[str, str]], text: str, **_: Any
) -> tuple[dict[str, str], float, bool]:
    """A turn is worth its share of odd characters; one that begins with a letter is the last."""
    reward = sum(ord(c) % 2 for c in text) / (len(text) + 1)
    return {"role": "tool", "content": "and"}, reward, text[:1].isalpha()


async def needs_answers(
    *, messages: Any, text: str, answers: Any, **_: Any
) -> tuple[None, float, bool]:
    return None, 0.0, True


async def goes_on(*, messages: Any, text: str, **_: Any) -> tuple[str, float, bool]:
    messages[0]["content"] = "forged"  # what it does to its copy is its own affair
    messages.clear()
    return "more", 0.0, False


async def slow_for_row_0(*, messages: Any, text: str, who: int, turns: int, **_: Any) -> Any:
    await asyncio.sleep(1.0 if who == 0 else 0.005)
    return "more", time.monotonic(), spoken(messages) == turns


async def meets(*, messages: Any, text: str, **_: Any) -> tuple[None, float, bool]:
    """Over when all of a round wait for each other: 3 calls."""
    global _waiting
    _waiting += 1
    while _waiting % 3:
        await asyncio.sleep(0.01)
    return None, 1.0, True


_waiting = 0


async def gives(*, messages: Any, text: str, answer: str, **_: Any) -> Any:
    """Whatever the column says, from the second turn on."""
    return eval(answer) if spoken(messages) == 2 else ("more", 0.0, False)


async def blocks(*, messages: Any, text: str, **_: Any) -> tuple[None, float, bool]:
    time.sleep(1.0)
    return None, 0.0, True


def not_async(*, messages: Any, text: str, **_: Any) -> tuple[None, float, bool]:
    return None, 0.0, True


class Scripted:
    """An engine that says what was written down: turn k of (row, sample) is `script[..][k - 1]`."""

    compilations = 0

    def __init__(
        self,
        script: Mapping[tuple[int, int], Sequence[Sequence[int]]],
        *,
        concurrent: bool = False,
        left_out: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self.script, self.concurrent, self.left_out = script, concurrent, left_out
        self.asked: list[tuple[tuple[int, ...], int, int, int]] = []  # ids, sample, limit, seed
        self.turns: dict[tuple[int, int], int] = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        limits: Sequence[int] | None = None,
        on_done: Any = None,
    ) -> list[Trajectory]:
        check_request(prompts, samples=samples, sampling=sampling, vocab_size=VOCAB, limits=limits)
        said = []
        for i, prompt in enumerate(prompts):
            limit = limits[i] if limits else sampling.max_new_tokens
            for sample in range(prompt.first_sample, prompt.first_sample + samples):
                self.asked.append((prompt.ids, sample, limit, seed))
                turn = self.turns[prompt.row, sample] = self.turns.get((prompt.row, sample), 0) + 1
                if (prompt.row, sample, turn) not in self.left_out:
                    said.append(self._say(prompt, sample, turn, limit, sampling.stop_token_ids))
        if prompts and not said:
            raise LeftOut("none came back")
        if on_done:
            on_done(said)
        return said

    def _say(
        self, prompt: Prompt, sample: int, turn: int, limit: int, stops: Sequence[int]
    ) -> Trajectory:
        ids = tuple(self.script[prompt.row, sample][turn - 1])[:limit]
        return Trajectory(
            prompt=prompt,
            sample=sample,
            response_ids=ids,
            logprobs=tuple(-0.5 * turn - 0.01 * i for i in range(len(ids))),
            finish_reason="stop" if ids[-1] in stops else "length",
            weight_version=10 + turn,
        )


def numbered(prompts: Sequence[Prompt], sample: int) -> list[Prompt]:
    """The same prompts whose first sample has this number."""
    return [replace(prompt, first_sample=sample) for prompt in prompts]


__all__ = ["BOS", "EOS"]


def play(engine: Any, prompts: Sequence[Prompt], stage: Stage | None, **changes: Any) -> Any:
    sampling = SCRIPT if hasattr(engine, "script") else ASK
    given = {"samples": 1, "sampling": sampling, "seed": 7} | changes
    return collect(engine, prompts, stage, **given)


def runs(trajectory: Trajectory, own: bool) -> list[tuple[int, ...]]:
    """Stretches of the policy's tokens, or of the environment's."""
    found: list[list[int]] = []
    before = not own
    for token, mine in zip(trajectory.response_ids, trajectory.mask, strict=True):
        if mine == own:
            if before != own:
                found.append([])
            found[-1].append(token)
        before = mine
    return [tuple(ids) for ids in found]
