"""The built-in tasks: right answers, the promised sizes, and no held-out question in training."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from jaxrl.errors import DataError
from jaxrl.tasks import chain_sum, larger_of_two, products, reverse_letters, sums

Rows = list[dict[str, str]]


def operands(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", row["prompt"]))


def unordered(rows: Rows) -> set[tuple[object, ...]]:
    """Questions up to a swap of the operands; + and - are different questions."""
    return {(*sorted(operands(row)), " - " in row["prompt"]) for row in rows}


@pytest.mark.parametrize(
    ("task", "train", "test", "held_out"),
    [(larger_of_two, 7610, 200, 200), (sums, 200, 79, 40), (chain_sum, 140, 60, None)],
)
def test_held_out_questions_are_not_trained_on_even_swapped(
    task: Callable[..., Rows], train: int, test: int, held_out: int | None
) -> None:
    trained, held = task("train"), task("test")
    assert (len(trained), len(held)) == (train, test)
    for rows in (trained, held):
        assert len({row["prompt"] for row in rows}) == len(rows)
    for seed in (1, 2):
        assert not unordered(trained) & unordered(task("test", seed=seed))
        assert not unordered(task("train", seed=seed)) & unordered(held)
    if held_out is not None:
        assert len(unordered(held)) == held_out


def test_larger_of_two_asks_for_the_larger_of_different_two_digit_numbers() -> None:
    for row in larger_of_two("train") + larger_of_two("test"):
        a, b = operands(row)
        assert 10 <= a <= 99 and 10 <= b <= 99 and a != b
        assert row["answer"] == str(max(a, b))
        assert row["prompt"] == f"Which number is larger: {a} or {b}?"
    # The place of the answer must not give it away.
    first = sum(operands(row)[0] > operands(row)[1] for row in larger_of_two("test"))
    assert 70 <= first <= 130
    train = larger_of_two("train")
    assert sum(operands(row)[0] > operands(row)[1] for row in train) == len(train) // 2


def test_sums_are_right_and_in_range_and_held_out_in_both_orders() -> None:
    for row in sums("train") + sums("test"):
        a, b = operands(row)
        assert 1 <= min(a, b) <= 9 and max(a, b) <= 20
        assert row["answer"] == str(a + b) and row["prompt"] == f"What is {a} + {b}?"
    held = {operands(row) for row in sums("test")}
    assert all((b, a) in held for a, b in held)


def test_chain_sums_are_all_of_reasoning_gyms_questions_and_right() -> None:
    rows = chain_sum("train") + chain_sum("test")
    assert len({row["prompt"] for row in rows}) == 200
    for row in rows:
        expression = row["metadata"]["expression"]  # type: ignore[index]
        assert expression in row["prompt"] and row["prompt"] == row["question"]
        left, sign, right = expression.split()
        assert row["answer"] == str(int(left) + (1 if sign == "+" else -1) * int(right))


@pytest.mark.parametrize("task", [larger_of_two, sums, chain_sum])
def test_seed_orders_and_size_limits(task: Callable[..., Rows]) -> None:
    assert task("test", seed=1) == task("test", seed=1)
    orders = [[row["prompt"] for row in task("train", seed=seed)] for seed in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert task("train", seed=1, size=5) == task("train", seed=1)[:5]
    with pytest.raises(DataError, match="split='validation' must be one of train, test"):
        task("validation")


def test_reversed_letters_and_splits_that_stay_apart_whatever_the_seed() -> None:
    words = {}
    for split in ("train", "validation", "test"):
        rows = [
            row
            for seed in (0, 1)
            for row in reverse_letters(split, seed=seed, size=2000, length=4)  # type: ignore[arg-type]
        ]
        for row in rows:
            assert re.fullmatch("[a-z]{4}>", row["prompt"])
            assert row["answer"] == row["prompt"][3::-1]
        words[split] = {row["prompt"] for row in rows}
    assert all(not words[a] & words[b] for a, b in combinations(words, 2))


def test_reversed_letters_are_distinct_reproducible_and_counted() -> None:
    rows = list(reverse_letters("test", seed=3, size=500))
    assert len({row["prompt"] for row in rows}) == len(rows) == 500
    assert rows == list(reverse_letters("test", seed=3, size=500))
    assert rows[:10] == list(reverse_letters("test", seed=3, size=10))
    assert len(rows[0]["answer"]) == 6


def test_reversed_letters_refuse_what_does_not_exist() -> None:
    with pytest.raises(DataError, match="not 100 words of 1 letters in the split 'test'"):
        list(reverse_letters("test", size=100, length=1))
    with pytest.raises(DataError, match="split='tset' must be one of train, validation, test"):
        list(reverse_letters("tset"))  # type: ignore[arg-type]


def test_products_are_right_and_held_out_in_both_orders() -> None:
    def asked(row: dict[str, Any]) -> tuple[int, int]:
        a, b = re.findall(r"\d+", row["prompt"][-1]["content"])
        return int(a), int(b)

    trained, held = products("train"), products("test")
    for row in trained + held:
        a, b = asked(row)
        assert 11 <= min(a, b) and max(a, b) <= 99 and row["answer"] == str(a * b)
        # One worked example before the question, of a product that is never asked.
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert [m["content"] for m in row["prompt"][2:5]] == ["calc(12 * 34)", "408", "408"]
        assert {a, b} != {12, 34}
    pairs = {tuple(sorted(asked(row))) for row in held}
    assert len(held) == len(pairs) == 200
    others = {asked(row) for row in trained}
    assert len(others) == len(trained) and not pairs & {tuple(sorted(pair)) for pair in others}
    assert {pair[::-1] for pair in others} == others
    assert len({tuple(sorted(pair)) for pair in others}) == 4004 - 200
    assert pairs == {tuple(sorted(asked(row))) for row in products("test", seed=5)}
    assert [asked(r) for r in products("test", seed=5)] != [asked(r) for r in held]
