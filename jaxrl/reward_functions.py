"""Reward functions that come with jaxrl; name them as ``jaxrl.reward_functions:last_number``.

Each is called as ``fn(prompts=, completions=, completion_ids=, **columns)``, every argument a list
with one entry a completion, and returns one float for each. One of your own looks the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

__all__ = ["exact_match", "last_number", "math_verify_reward", "reasoning_gym_score"]

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w.)\]]) [-+] )?                                # 7-5 is two numbers, = -5 is one
    (?: (?<![\d.,]) (?P<grouped> [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9]) (?:\.[0-9]+)? )
      | (?P<plain> [0-9]+ (?:\.[0-9]+)? | (?<!\w) \.[0-9]+ ) )
    """,
    re.VERBOSE,
)
_MINUS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-"})


def exact_match(*, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the completion is the column `answer`, surrounding white space aside.

    >>> exact_match(completions=[" fedcba", "fedcb"], answer=["fedcba", "fedcba"])
    [1.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == str(expected).strip()) for completion, expected in pairs]


def last_number(*, completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last number in the completion equals the last number in the column `answer`.

    Thousands commas, signs (the Unicode minus too), decimals and a full stop after the number are
    understood; a worked solution as answer, as in GSM8K, counts by its last number.

    Raises:
        ValueError: An answer holds no number.

    >>> last_number(completions=["7 + 5 = 12.", "1,234 or 12"], answer=[12, "#### 1,234"])
    [1.0, 0.0]
    """
    scores = []
    for index, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        wanted = _last(str(expected))
        if wanted is None:
            raise ValueError(f"the answer of completion {index} holds no number: {expected!r}")
        scores.append(float(_last(completion) == wanted))
    return scores


def math_verify_reward(
    *, completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float]:
    r"""1 where math_verify finds the completion equal to the column `answer` (1/2, 0.5, \frac12).

    Raises:
        ValueError: An answer is not mathematics that math_verify can read.
    """
    from math_verify import parse, verify

    scores = []
    for index, (completion, expected) in enumerate(zip(completions, answer, strict=True)):
        # A bare answer is marked as mathematics: of "1 + x" in prose only the 1 would be taken.
        marked = any(mark in str(expected) for mark in ("$", r"\(", r"\[", r"\boxed"))
        gold = parse(str(expected) if marked else f"${expected}$")
        if not gold:
            raise ValueError(
                f"math_verify cannot read the answer of completion {index}: {expected!r}"
            )
        scores.append(float(verify(gold, parse(completion))))
    return scores


def reasoning_gym_score(
    *,
    completions: Sequence[str],
    question: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """The score of the reasoning_gym dataset that a row comes from, between 0 and 1.

    The text between the last <answer> and </answer> is scored; without these tags, all of it.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    scores = []
    rows = zip(completions, question, answer, metadata, strict=True)
    for completion, asked, expected, details in rows:
        given = extract_answer(completion)
        entry = {"question": asked, "answer": expected, "metadata": details}
        score: Any = get_score_answer_fn(details["source_dataset"])
        scores.append(float(score(completion.strip() if given is None else given, entry)))
    return scores


def _last(text: str) -> Decimal | None:
    matches = list(_NUMBER.finditer(text.translate(_MINUS)))
    if not matches:
        return None
    found = matches[-1]
    return Decimal((found["sign"] or "") + (found["grouped"] or found["plain"]).replace(",", ""))
