"""The calculator: what it computes, what it refuses, and what an answer is worth."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxrl.environments import calculate, calculator


def say(text: str, answer: str = "1776") -> Any:
    return asyncio.run(calculator(text=text, answer=answer, messages=[], other=1))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37 * 48", 1776),
        ("37*48", 1776),
        (" 1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-7 // 2", -4),
        ("10 - 3 - 2", 5),
        ("999999 * 1000000", 999999000000),
        ("--5", 5),
    ],
)
def test_whole_numbers(expression: str, value: int):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "37 x 48",
        "2 ** 9",
        "1 / 2",
        "7 % 2",
        "1.5 * 2",
        "True + 1",
        "'a' * 3",
        "x",
        "abs(3)",
        "__import__('os')",
        "(lambda: 1)()",
        "[1][0]",
        "1 if 1 else 2",
        "1; 2",
        "9" * 13,
        "1000000 * 1000001",
        "1 // 0",
        "(" * 30 + "1",
        "1" + " + 1" * 20,
        "\x00",
        "+5",
    ],
)
def test_everything_else_is_refused(expression: str):
    with pytest.raises(ValueError):
        calculate(expression)


def test_a_call_is_answered_and_worth_nothing():
    assert say("calc(37 * 48)") == ({"role": "tool", "content": "1776"}, 0.0, False)
    assert say("calc((1 + 2) * 3)")[0]["content"] == "9"
    assert say("I use calc(2 * 3)\nand calc(3 * 3)")[0]["content"] == "6"
    assert say("calc(1 // 0)")[0]["content"] == "error: division by zero"
    assert say("calc(37 times 48)")[0]["content"] == "error: not an expression"
    # A call beside the answer is still a call: an answer is what was said knowing the result.
    assert say("calc(37 * 48) = 1776")[1:] == (0.0, False)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1776", 1.0), ("It is 1,776.", 1.0), ("1776 or 1777", 0.0), ("calc 37 * 48", 0.0), ("", 0.0)],
)
def test_the_last_number_of_an_answer_counts(text: str, reward: float):
    assert say(text) == (None, reward, True)
