"""Reward functions, run in a worker process under a time limit.

They run in the main thread of a process of their own (`reward_worker`), so that one that uses
`signal.alarm`, hangs or crashes cannot take the run with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config import RewardFunctionConfig
from jaxrl.errors import RewardError
from jaxrl.reward_process import RewardProcess
from jaxrl.reward_request import Asked, shown
from jaxrl.reward_values import Reward
from jaxrl.types import Prompt

__all__ = ["FunctionRewards"]

_IMPORT_S = 300.0
"""Seconds the functions' modules may take to import; a cold machine can be very slow at it."""


class _WorkerDiedError(RewardError):
    """The worker ended by itself before it answered."""


class FunctionRewards:
    """The functions of `reward.functions`, as one `RewardSource`."""

    def __init__(self, functions: Sequence[RewardFunctionConfig], timeout_s: float) -> None:
        """Start the worker and import the functions there.

        Args:
            functions: At least one, each named once.
            timeout_s: Seconds a call of one function may take.

        Raises:
            RewardError: A function cannot be imported; names its place in the settings.
        """
        self._names = [function.fn for function in functions]
        self._timeout_s = timeout_s
        self.parts = [(f.fn, f"reward function {f.fn}", f.weight) for f in functions]
        self._worker: RewardProcess | None = None
        self._start()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Nothing is known of what the functions need until they are called."""

    def ask(self, asked: Asked) -> Iterator[list[Reward]]:
        """Call ``fn(prompts=, completions=, completion_ids=, **columns)``, one function at a time.

        Raises:
            RewardError: A function raised (with its traceback and the prompt), took too long, or
                did not return a reward for each completion.
        """
        worker = self._hand_over(asked.basics() | asked.columns())
        for index in range(len(self._names)):
            yield self._call(worker, index, asked.prompts)

    def close(self) -> None:
        """End the worker; the next `ask` would start another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _hand_over(self, batch: dict[str, list[Any]]) -> RewardProcess:
        """A worker that has read `batch`. One that has died since its last call is replaced, once.

        The system may still call a dying process alive, so that its death shows only here.
        """
        request, what, used = ("batch", batch), "reading the batch", self._worker is not None
        worker = self._start()
        try:
            self._ask(worker, request, self._timeout_s, what)
        except _WorkerDiedError:
            if not used:
                raise
            worker = self._start()
            self._ask(worker, request, self._timeout_s, what)
        return worker

    def _start(self) -> RewardProcess:
        """The running worker, or a new one with the functions loaded."""
        if self._worker is not None and self._worker.alive():
            return self._worker
        self.close()
        worker = self._worker = RewardProcess()
        answer = self._ask(worker, ("load", sys.path, self._names), _IMPORT_S, "importing")
        if answer[0] == "missing":
            self.close()
            _, index, text = answer
            raise RewardError(
                f"reward.functions[{index}].fn={self._names[index]!r} cannot be used: {text}; "
                "give module:function, importable from here"
            )
        return worker

    def _call(self, worker: RewardProcess, index: int, prompts: Sequence[Prompt]) -> list[Reward]:
        name = self._names[index]
        kind, content = self._ask(worker, ("call", index), self._timeout_s, name)
        if kind == "unusable":
            raise RewardError(
                f"reward function {name} {content}; it must return one float for each, or a list "
                "with one for each token"
            )
        if kind == "raised":
            _, culprit = self._ask(worker, None, self._timeout_s, name, default=("culprit", None))
            at = "" if culprit is None else f" for completion {culprit}, {shown(prompts[culprit])}"
            raise RewardError(f"reward function {name} raised an exception{at}:\n{content}")
        return content

    def _ask(
        self,
        worker: RewardProcess,
        request: Any,
        seconds: float,
        what: str,
        default: tuple[Any, ...] | None = None,
    ) -> tuple[Any, ...]:
        """Send `request` (None: nothing more) and wait for the answer; a silent worker is ended."""
        try:
            return worker.ask(request, seconds)
        except TimeoutError:
            self.close()
            if default is not None:
                return default
            raise RewardError(
                f"reward function worker: {what} took longer than {seconds:g} s; make it faster, "
                "or raise reward.timeout_s"
            ) from None
        except (EOFError, OSError):
            by_itself = self._worker is worker  # else `close` of another thread has ended it
            code = worker.exit_code()
            self.close()
            kind = _WorkerDiedError if by_itself else RewardError
            raise kind(f"reward function worker died with exit code {code} in {what}") from None
