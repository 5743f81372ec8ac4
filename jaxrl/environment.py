"""The environment of episodes: an async function that answers each of the policy's turns.

``rollout.env`` names it as ``module:function``. It is awaited as

    await fn(messages=[...], text="...", **columns) -> (next_message, reward, over)

with the chat so far (the policy's last turn included, as an assistant message), the text of that
turn, and the columns of the prompt's row. `next_message` is a dict with role and content, or a
string, which is a user message, or None; it is read where the episode goes on. `reward` belongs to
the turn. The calls of a run share one event loop in a thread of its own, so a client or a lock may
be kept from call to call; what blocks belongs into ``asyncio.to_thread``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import numbers
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.errors import ConfigError, DataError, RolloutError
from jaxrl.loop_thread import LoopThread, StuckError
from jaxrl.named_function import load_function
from jaxrl.types import Prompt

__all__ = ["Environment", "Reply", "Turn"]

Message = Mapping[str, Any]
_RESERVED = ("messages", "text")
_LARGEST = float(np.finfo(np.float32).max)


class Turn(NamedTuple):
    """What the environment is asked about."""

    prompt: Prompt
    sample: int
    number: int
    """1 is the policy's first turn."""
    messages: Sequence[Message]
    text: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"prompt row {self.prompt.row}, sample {self.sample}, turn {self.number}"


class Reply(NamedTuple):
    """What it answers."""

    message: Message | None
    """What the policy reads next; None exactly where the episode is over."""
    reward: float
    over: bool


class Environment:
    """Asks the function; several threads may do so at once."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """Import the function, and start the event loop.

        Args:
            name: ``module:function``.
            timeout_s: seconds a call may take.

        Raises:
            ConfigError: it cannot be imported, or is not async.
        """
        try:
            self._function = load_function(name)
        except ImportError as error:
            raise ConfigError(
                f"rollout.env={name!r} cannot be used: {error}; give module:function, importable "
                "from here"
            ) from error
        if not _is_async(self._function):
            raise ConfigError(
                f"rollout.env={name!r} must be an async function, "
                "async def f(*, messages, text, **columns), so that the episodes of a batch need "
                "not wait for each other"
            )
        self.name = name
        self._timeout_s = timeout_s
        self._loop = LoopThread("environment")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """See that the function can be called for `prompts`; it is not called.

        Raises:
            DataError: a column has a name that is taken, or the function takes other arguments;
                names the row.
        """
        for prompt in prompts:
            for name in _RESERVED:
                if name in prompt.columns:
                    raise DataError(
                        f"row {prompt.row} has a column {name!r}, a name that rollout.env is "
                        "called with; rename the column"
                    )
            try:
                inspect.signature(self._function).bind(messages=[], text="", **prompt.columns)
            except TypeError as error:
                raise DataError(
                    f"row {prompt.row}: rollout.env={self.name!r} cannot be called with messages, "
                    f"text and the columns {', '.join(prompt.columns) or '(none)'}: {error}"
                ) from error

    def ask(self, turns: Sequence[Turn]) -> list[Reply]:
        """The answers to `turns`, in order; all calls run at once.

        Raises:
            RolloutError: a call failed (with its traceback), took too long, or gave something that
                is no answer; names row, sample and turn.
        """

        async def round_of_calls() -> list[Reply]:
            tasks = [asyncio.ensure_future(self._call(turn)) for turn in turns]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        try:
            return self._loop.run(round_of_calls(), stuck_s=self._timeout_s)
        except StuckError:
            raise RolloutError(
                f"rollout.env={self.name} has blocked the event loop of all episodes for more than "
                f"rollout.env_timeout_s={self._timeout_s:g} s (one of {len(turns)} calls, the "
                f"first for {turns[0].name}); await what takes long, or put it into "
                "asyncio.to_thread"
            ) from None

    def close(self) -> None:
        """End the loop and what runs in it; idempotent."""
        # A call that blocks the loop cannot be ended from outside; its thread dies with the run.
        with contextlib.suppress(TimeoutError):
            self._loop.close(seconds=2.0)

    async def _call(self, turn: Turn) -> Reply:
        # It may change what it is given: the next turn is not to depend on that.
        messages = copy.deepcopy([dict(message) for message in turn.messages])
        columns = copy.deepcopy(dict(turn.prompt.columns))
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answer = await self._function(messages=messages, text=turn.text, **columns)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise RolloutError(
                    f"{turn.name}: rollout.env={self.name} took longer than {self._timeout_s:g} s; "
                    "make it faster, or raise rollout.env_timeout_s"
                ) from None
            raise RolloutError(
                f"{turn.name}: rollout.env={self.name} raised an exception:\n"
                f"{''.join(traceback.format_exception(error))}"
            ) from error
        try:
            return _read(answer)
        except ValueError as error:
            raise RolloutError(
                f"{turn.name}: rollout.env={self.name} must return (message, reward, over); {error}"
            ) from None


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object may be the function
    )


def _read(answer: Any) -> Reply:
    """The answer, checked; a ValueError says what is wrong with it."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ValueError(f"it returned {_short(answer)}")
    message, reward, over = answer
    if not isinstance(over, bool | np.bool_):
        raise ValueError(f"over is {_short(over)}, not a bool")
    if not isinstance(reward, numbers.Real) or not abs(float(reward)) <= _LARGEST:
        raise ValueError(f"the reward is {_short(reward)}, not a finite number")
    if over:
        return Reply(None, float(reward), True)
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    if message is None:
        raise ValueError("it returned no message, though the episode is not over")
    if not isinstance(message, Mapping):
        raise ValueError(f"the message is {_short(message)}, neither a dict nor a string")
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise ValueError(f"the message is {_short(message)}; role and content must be strings")
    if message["role"] == "assistant":
        raise ValueError("the message has the role assistant, which is the policy's own")
    return Reply(dict(message), float(reward), False)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
