"""Small tasks that yield rows (`prompt`, `answer`), for `data.train.kind=python`.

Each has splits that share no question, not even with the operands swapped, whatever the arguments:
the partition is drawn from a seed of its own.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxrl.errors import DataError

__all__ = ["chain_sum", "larger_of_two", "products", "reverse_letters", "sums"]

Row = dict[str, Any]
Split = Literal["train", "test"]

_PARTITION_SEED = 20
_SHOWN = (12, 34)
"""The product that prompts of `products` work out; it is never asked."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def larger_of_two(split: Split, seed: int = 0, size: int | None = None) -> list[Row]:
    """Which of two different two-digit numbers is larger.

    Of the 4,005 unordered pairs 200 are held out (split "test", each asked once, in an order drawn
    from `seed`); the others are for training, 7,610 questions since both orders are asked.

    Args:
        split: "train" or "test".
        seed: Order of the questions, and of the numbers in a held-out one.
        size: Questions to take; None takes all.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    held_out, rest = _partition(pairs, 200)
    rng = random.Random(seed)
    if _chosen(split) == "test":
        ordered = [pair if rng.random() < 0.5 else pair[::-1] for pair in held_out]
    else:
        ordered = [order for pair in rest for order in (pair, pair[::-1])]
    rng.shuffle(ordered)
    return [
        {"prompt": f"Which number is larger: {a} or {b}?", "answer": str(max(a, b))}
        for a, b in ordered[:size]
    ]


def sums(split: Split, seed: int = 0, size: int | None = None) -> list[Row]:
    """Sums a + b with 1 <= a <= 20 and 1 <= b <= 9, asked in both orders.

    Of the 144 unordered pairs 40 are held out (split "test", 79 questions) and never occur in
    training in any order (200 questions).

    Args:
        split: "train" or "test".
        seed: Order of the questions.
        size: Questions to take; None takes all.
    """
    pairs = sorted({(min(a, b), max(a, b)) for a in range(1, 21) for b in range(1, 10)})
    held_out, rest = _partition(pairs, 40)
    chosen = held_out if _chosen(split) == "test" else rest
    ordered = sorted({order for pair in chosen for order in (pair, pair[::-1])})
    random.Random(seed).shuffle(ordered)
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ordered[:size]]


def chain_sum(split: Split, seed: int = 0, size: int | None = None) -> list[Row]:
    """reasoning_gym's chain_sum with two terms of one digit, + and -.

    Of its 200 questions 60 are held out (split "test"), always together with the one that has the
    operands swapped; the other 140 are for training. Rows have reasoning_gym's columns as well.

    Args:
        split: "train" or "test".
        seed: Order of the questions.
        size: Questions to take; None takes all.
    """
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=4000, seed=0
    )
    twins: dict[tuple[str, ...], dict[str, Row]] = {}
    for entry in entries:
        expression = entry["metadata"]["expression"]
        twins.setdefault(tuple(sorted(expression.split())), {})[expression] = entry
    held_out, rest = [], []
    for group in _partition(sorted(twins), len(twins))[0]:
        questions = list(twins[group].values())
        (held_out if len(held_out) + len(questions) <= 60 else rest).extend(questions)
    chosen = held_out if _chosen(split) == "test" else rest
    chosen.sort(key=lambda entry: entry["question"])
    random.Random(seed).shuffle(chosen)
    return [{"prompt": entry["question"], **entry} for entry in chosen[:size]]


def products(split: Split, seed: int = 0, size: int | None = None) -> list[Row]:
    """Products a * b of numbers from 11 to 99, to be found with a calculator.

    The prompt is a chat that says to use it and shows the call once, ``calc(12 * 34)``, with its
    result and the answer given from it. Of the other 4,004 unordered pairs 200 are held out (split
    "test", each asked once); the others are for training, in both orders.

    Args:
        split: "train" or "test".
        seed: Order of the questions, and of the numbers in a held-out one.
        size: Questions to take; None takes all.
    """
    pairs = [(a, b) for a in range(11, 100) for b in range(a, 100) if (a, b) != _SHOWN]
    held_out, rest = _partition(pairs, 200)
    rng = random.Random(seed)
    if _chosen(split) == "test":
        ordered = [pair if rng.random() < 0.5 else pair[::-1] for pair in held_out]
    else:
        ordered = sorted({order for pair in rest for order in (pair, pair[::-1])})
    rng.shuffle(ordered)
    return [{"prompt": _with_example(a, b), "answer": str(a * b)} for a, b in ordered[:size]]


def _with_example(a: int, b: int) -> list[dict[str, str]]:
    shown = str(_SHOWN[0] * _SHOWN[1])
    chat = (
        ("system", "Use calc to compute."),
        ("user", "What is {} * {}?".format(*_SHOWN)),
        ("assistant", "calc({} * {})".format(*_SHOWN)),
        ("tool", shown),
        ("assistant", shown),
        ("user", f"What is {a} * {b}?"),
    )
    return [{"role": role, "content": content} for role, content in chat]


def reverse_letters(
    split: Literal["train", "validation", "test"], seed: int = 0, size: int = 10000, length: int = 6
) -> Iterator[Row]:
    """A random word and its reverse: ``abcdef>`` -> ``fedcba``, each word once.

    A word's checksum decides its split: eight in ten words are for training, one for validation and
    one for testing.

    Args:
        split: Which words.
        seed: Which of them, and their order.
        size: How many.
        length: Letters of a word.
    """
    share = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}[
        _chosen(split, ("train", "validation", "test"))
    ]
    rng = random.Random(seed)
    seen: set[str] = set()
    for _ in range(200 * size + 10000):
        if len(seen) == size:
            return
        word = "".join(rng.choices(_LETTERS, k=length))
        if zlib.crc32(word.encode()) % 10 in share and word not in seen:
            seen.add(word)
            yield {"prompt": f"{word}>", "answer": word[::-1]}
    raise DataError(
        f"there are not {size} words of {length} letters in the split {split!r}; ask for fewer, or "
        "for longer ones"
    )


def _partition(items: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """`count` of `items` and the others, always the same ones."""
    shuffled = random.Random(_PARTITION_SEED).sample(items, len(items))
    return shuffled[:count], shuffled[count:]


def _chosen(split: str, splits: Sequence[str] = ("train", "test")) -> str:
    if split not in splits:
        raise DataError(f"split={split!r} must be one of {', '.join(splits)}")
    return split
