"""What a reward source may answer, read into plain numbers.

Standard library only: the reward worker loads this file on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Reward", "UnusableReward", "read_rewards"]

Reward = float | None | list[float | None]
"""Of one completion: a number, none, or a number (or none) for each of its tokens."""


class UnusableReward(Exception):
    """An answer is not one reward for each completion; reads on after the source's name."""


def read_rewards(answer: Any, lengths: Sequence[int]) -> list[Reward]:
    """The rewards in `answer`, which may be a list, tuple, array or tensor.

    Args:
        answer: One entry a completion: a number or None, or a list of these with one a token.
        lengths: Tokens of each completion.

    Raises:
        UnusableReward: Saying what was returned instead.

    >>> read_rewards([1, None, (0.5, 2)], [3, 3, 2])
    [1.0, None, [0.5, 2.0]]
    """
    given, count = type(answer).__name__, len(lengths)
    try:
        length = len(answer)
    except TypeError:
        raise UnusableReward(f"returned one {given} for {count} completions") from None
    if isinstance(answer, str | bytes | dict | set | frozenset):
        raise UnusableReward(f"returned a {given} for {count} completions")
    if length != count:
        raise UnusableReward(f"returned {length} values for {count} completions")
    return [_reward(value, index, lengths[index]) for index, value in enumerate(answer)]


def _reward(value: Any, index: int, length: int) -> Reward:
    if not (isinstance(value, list | tuple) or len(getattr(value, "shape", ())) == 1):
        return _number(value, f"completion {index}")
    if len(value) != length:
        raise UnusableReward(
            f"returned {len(value)} numbers for the {length} tokens of completion {index}"
        )
    return [_number(entry, f"token {at} of completion {index}") for at, entry in enumerate(value)]


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar, or an array or tensor without axes
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64
            return math.inf if value > 0 else -math.inf
    raise UnusableReward(f"returned {value!r} ({type(value).__name__}) for {where}")
