"""Scores of completions: reward functions run in a worker process, under a time limit.

The functions run in the main thread of a process of their own (`reward_worker`), so that one that
uses `signal.alarm`, hangs or crashes cannot take the run with it, and what they return is checked
before it can reach an advantage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np

from jaxrl.config import RewardFunctionConfig
from jaxrl.errors import RewardError
from jaxrl.reward_process import RewardProcess
from jaxrl.types import Prompt, Trajectory

__all__ = ["Scorer", "Scores", "score_trajectories", "total_scores"]

_IMPORT_S = 300.0
"""Seconds the functions' modules may take to import; a cold machine can be very slow at it."""


@dataclass(frozen=True)
class Scores:
    """What a batch of N completions is worth."""

    values: np.ndarray
    """float32 [N], the weighted sum; 0 where not valid."""
    valid: np.ndarray
    """bool [N]; False where a function gave None, NaN or inf."""
    per_function: dict[str, np.ndarray]
    """float32 [N] for each function, before its weight; NaN where it gave no number."""
    tokens: tuple[np.ndarray | None, ...] = ()
    """float32 rewards of each completion's tokens beside `values`, None where there are none; empty
    where no source gave any."""


class Scorer:
    """Runs reward functions; also a context manager that closes itself."""

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        timeout_s: float,
        on_invalid: Literal["error", "drop"],
    ) -> None:
        """Start the worker and import the functions there.

        Args:
            functions: At least one, each named once.
            timeout_s: Seconds a call of one function may take.
            on_invalid: None, NaN or inf raises, or makes the completion invalid.

        Raises:
            RewardError: A function cannot be imported; names its place in the settings.
        """
        if not functions:
            raise RewardError(
                "there are no reward functions; name at least one in reward.functions"
            )
        self._functions = list(functions)
        self._timeout_s = timeout_s
        self._on_invalid = on_invalid
        self._worker: RewardProcess | None = None
        self._start()

    def __enter__(self) -> Scorer:
        """The scorer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
    ) -> Scores:
        """Score `completions`.

        A function is called as ``fn(prompts=, completions=, completion_ids=, **columns)``, every
        argument a list with one entry a completion; a column that a row lacks is None there.

        Args:
            prompts: The prompt of each completion.
            completions: Text.
            completion_ids: Token ids of each completion.

        Raises:
            RewardError: A function raised (with its traceback and the prompt), took too long, or
                did not return one number for each completion.
        """
        count = len(completions)
        if not len(prompts) == len(completion_ids) == count:
            raise ValueError(
                f"prompts ({len(prompts)}), completions ({count}) and completion_ids "
                f"({len(completion_ids)}) must be equally many"
            )
        if not count:
            none = {function.fn: np.zeros(0, np.float32) for function in self._functions}
            return Scores(np.zeros(0, np.float32), np.zeros(0, bool), none)
        worker = self._start()
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        batch = {
            "prompts": [prompt.text for prompt in prompts],
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
        } | {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        self._ask(worker, ("batch", batch), self._timeout_s, "reading the batch")
        total = np.zeros(count, np.float64)
        per_function = {}
        for index, function in enumerate(self._functions):
            values = self._call(worker, index, prompts)
            per_function[function.fn] = values.astype(np.float32)
            total += function.weight * values
        values = self._finite(total, total, "the weighted sum of the reward functions", prompts)
        values = values.astype(np.float32)
        valid = np.isfinite(values)
        return Scores(np.where(valid, values, np.float32(0)), valid, per_function)

    def probe(self, prompts: Sequence[Prompt]) -> None:
        """Call every function once, with empty completions for the first `prompts`.

        A function that raises, needs a column the data lacks or returns something unusable is then
        found before the first rollout. None, NaN and inf are not complaints here.
        """
        few = list(prompts[:2])
        strict, self._on_invalid = self._on_invalid, "drop"
        try:
            self.score(few, [""] * len(few), [[]] * len(few))
        finally:
            self._on_invalid = strict

    def close(self) -> None:
        """End the worker; the next `score` would start another."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _start(self) -> RewardProcess:
        """The running worker, or a new one with the functions loaded."""
        if self._worker is not None and self._worker.alive():
            return self._worker
        self.close()
        worker = self._worker = RewardProcess()
        names = [function.fn for function in self._functions]
        answer = self._ask(worker, ("load", sys.path, names), _IMPORT_S, "importing")
        if answer[0] == "missing":
            self.close()
            _, index, text = answer
            raise RewardError(
                f"reward.functions[{index}].fn={names[index]!r} cannot be used: {text}; "
                "give module:function, importable from here"
            )
        return worker

    def _call(self, worker: RewardProcess, index: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """The function's numbers, float64 [N], NaN where there is none."""
        name = self._functions[index].fn
        kind, content = self._ask(worker, ("call", index), self._timeout_s, name)
        if kind == "unusable":
            raise RewardError(
                f"reward function {name} {content}; it must return one float for each"
            )
        if kind == "raised":
            _, culprit = self._ask(worker, None, self._timeout_s, name, default=("culprit", None))
            at = "" if culprit is None else f" for completion {culprit}, {_shown(prompts[culprit])}"
            raise RewardError(f"reward function {name} raised an exception{at}:\n{content}")
        values = np.array([math.nan if value is None else value for value in content], np.float64)
        return self._finite(values, content, f"reward function {name}", prompts)

    def _finite(
        self, values: np.ndarray, given: Any, who: str, prompts: Sequence[Prompt]
    ) -> np.ndarray:
        """`values`, NaN where float32 has no finite number for them; or an error, as configured."""
        bad = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
        if bad.size and self._on_invalid == "error":
            first = int(bad[0])
            raise RewardError(
                f"{who} returned {given[first]} for completion {first}, "
                f"{_shown(prompts[first])} ({bad.size} of {len(values)} completions); return a "
                "finite number, or set reward.on_invalid=drop to leave such completions out"
            )
        values = values.copy()
        values[bad] = math.nan
        return values

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
            code = worker.exit_code()
            self.close()
            raise RewardError(
                f"reward function worker died with exit code {code} in {what}"
            ) from None


def score_trajectories(
    scorer: Scorer, tokenizer: Any, trajectories: Sequence[Trajectory]
) -> Scores:
    """Scores of the completions as text; ids are decoded once, for the rewards only."""
    texts = [tokenizer.decode(t.response_ids, skip_special_tokens=True) for t in trajectories]
    return scorer.score(
        [t.prompt for t in trajectories], texts, [t.response_ids for t in trajectories]
    )


def total_scores(trajectories: Sequence[Trajectory], scores: Scores) -> np.ndarray:
    """Score of each trajectory with all its other rewards, before any scaling, float32 [N]."""
    totals = np.array(scores.values, np.float32)
    for i, trajectory in enumerate(trajectories):
        totals[i] += sum(trajectory.rewards)
        if scores.tokens and (tokens := scores.tokens[i]) is not None:
            totals[i] += np.sum(tokens)
    return totals


def _shown(prompt: Prompt) -> str:
    text = prompt.text if len(prompt.text) <= 200 else prompt.text[:200] + "..."
    return f"row {prompt.row}, prompt {text!r}"
