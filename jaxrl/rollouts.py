"""The batches of completions that iterations train on, in order, generated when due or ahead.

With `rollout.max_staleness` 0 the batch of an iteration is generated when it is asked for. With
k > 0 the batches of the next k iterations are under way meanwhile, so that servers work while the
trainer does; a batch begins at most k weight versions before the one that trains on it, and goes on
with newer weights as they are published.

No batch begins before an evaluation or a checkpoint that comes before it (they find the engine
idle), so a run that is resumed from a checkpoint asks for what an uninterrupted one asks for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config import Config
from jaxrl.cursor import PromptCursor
from jaxrl.rollout.engine import OnDone, RolloutEngine
from jaxrl.scoring import Scores
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["Batch", "Rollouts", "is_due", "rollout_seed"]


def rollout_seed(seed: int, iteration: int) -> int:
    """Seed of an iteration's requests: a function of the run's seed and the iteration alone."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1)[0])


def is_due(every: int, done: int, total: int) -> bool:
    """Whether something that happens every `every` iterations (0: at the end) does after `done`."""
    return done == total or (every > 0 and done % every == 0)


class Batch(NamedTuple):
    """What one iteration trains on."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]
    scores: Scores
    """One for each trajectory."""
    cursor: dict[str, int]
    """Place in the prompt set after its prompts: what a checkpoint of this iteration saves."""
    figures: dict[str, float]
    """Metrics of how it came about."""


class Rollouts:
    """Takes prompts, asks the engine, and hands out batches in order."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        cursor: PromptCursor,
        sampling: Sampling,
        score: Callable[[Sequence[Trajectory]], Scores],
    ) -> None:
        """Begin with the first iteration that `take` asks for."""
        self._config, self._engine, self._cursor = config, engine, cursor
        self._sampling, self._score = sampling, score
        self._begun: deque[tuple[int, Future[Batch]]] = deque()
        depth = config.rollout.max_staleness
        self._threads = ThreadPoolExecutor(depth + 1, "rollouts") if depth else None

    def take(self, iteration: int, on_done: OnDone | None = None) -> Batch:
        """The batch of `iteration`, with those of the next ones begun as far as allowed.

        `on_done` is told of finished completions of this batch, unless it was begun earlier.
        """
        last = self._last_allowed(iteration)
        first = self._begun[-1][0] + 1 if self._begun else iteration
        for number in range(first, last + 1):
            self._begun.append((number, self._begin(number, on_done)))
        number, batch = self._begun.popleft()
        assert number == iteration, "iterations take their batches in order"
        return batch.result()

    def close(self) -> None:
        """Wait for nothing more; the engine's own `close` ends what is under way."""
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _last_allowed(self, iteration: int) -> int:
        """The last iteration whose batch may begin while `iteration` is still to be trained."""
        config, last = self._config, iteration
        while last < min(iteration + config.rollout.max_staleness, config.iterations - 1):
            due = (
                is_due(every, last + 1, config.iterations)
                for every in (config.eval.every, config.checkpoint.every)
            )
            if any(due):
                break
            last += 1
        return last

    def _begin(self, iteration: int, on_done: OnDone | None) -> Future[Batch]:
        config = self._config
        prompts = self._cursor.take(config.rollout.prompts)
        cursor = self._cursor.state()

        def generate() -> Batch:
            trajectories = self._engine.generate(
                prompts,
                samples=config.rollout.samples,
                sampling=self._sampling,
                seed=rollout_seed(config.seed, iteration),
                on_done=on_done,
            )
            return Batch(prompts, trajectories, self._score(trajectories), cursor, {})

        return self._threads.submit(generate) if self._threads else _now(generate)


def _now(work: Callable[[], Any]) -> Future[Any]:
    """A finished future: the synchronous case, in the caller's thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future
