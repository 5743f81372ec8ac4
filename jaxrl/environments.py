"""Environments that come with jaxrl; name them as ``jaxrl.environments:calculator``.

Each is called as ``await fn(messages=, text=, **columns)`` after a turn of the policy and returns
(next message or None, reward, whether the episode is over). One of your own looks the same.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from jaxrl.reward_functions import last_number

__all__ = ["calculate", "calculator"]

_CALL = re.compile(r"calc\((.*)\)")
_LONGEST = 64
"""Characters of an expression."""
_LARGEST = 10**12
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


async def calculator(
    *, text: str, answer: Any, **_: Any
) -> tuple[dict[str, str] | None, float, bool]:
    """A tool for whole numbers: ``calc(37 * 48)`` is answered with ``1776``.

    A turn with a call is answered by its result, or by what is wrong with it, and is worth nothing;
    a turn without one is the final answer, worth 1 if its last number is the column `answer`. A
    call reaches to the last bracket of its line; the first one of a turn counts.
    """
    call = _CALL.search(text)
    if call is None:
        (right,) = last_number(completions=[text], answer=[answer])
        return None, right, True
    try:
        content = str(calculate(call[1]))
    except ValueError as error:
        content = f"error: {error}"
    return {"role": "tool", "content": content}, 0.0, False


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers, + - * // and brackets.

    Raises:
        ValueError: It is something else, or too long, or goes beyond 10^12.

    >>> calculate("(3 + 4) * -5")
    -35
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only whole numbers, + - * // and brackets are allowed")
    if abs(value) > _LARGEST:
        raise ValueError("a number beyond 10^12")
    return value
