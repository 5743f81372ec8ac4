"""The batches of completions that iterations train on, in order, generated when due or ahead.

With `rollout.max_staleness` 0 the batch of an iteration is generated when it is asked for. With
k > 0 the batches of the next k iterations are under way meanwhile, so that servers work while the
trainer does; a batch begins at most k weight versions before the one that trains on it, and goes on
with newer weights as they are published.

No batch begins before an evaluation or a checkpoint that comes before it (they find the engine
idle), so a run that is resumed from a checkpoint asks for what an uninterrupted one asks for.

With `rollout.dynamic_sampling` how many prompts a batch takes follows from its scores. The next
batch then begins only when that is known, still ahead of its training: which prompts it takes never
depends on which of two was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrl.config import Config
from jaxrl.cursor import PromptCursor
from jaxrl.dynamic_sampling import Sampled, sample_with_spread
from jaxrl.episodes import Stage, collect
from jaxrl.processes import ALONE, Peers
from jaxrl.rollout.engine import OnDone, RolloutEngine
from jaxrl.scoring import Scores
from jaxrl.sharing import sample_shared
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
        stage: Stage | None = None,
        peers: Peers = ALONE,
    ) -> None:
        """Begin with the first iteration that `take` asks for.

        Args:
            config: the settings.
            engine: samples.
            cursor: where prompts come from.
            sampling: how completions are sampled.
            score: scores trajectories; called from several threads.
            stage: environment of episodes, if there is one.
            peers: processes that share each batch.
        """
        self._peers = peers
        self._config, self._engine, self._cursor = config, engine, cursor
        self._sampling, self._score, self._stage = sampling, score, stage
        self._begun: deque[tuple[int, Future[Batch]]] = deque()
        depth = config.rollout.max_staleness
        workers = 1 if config.rollout.dynamic_sampling else depth + 1
        self._threads = ThreadPoolExecutor(workers, "rollouts") if depth else None

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
        """Take its prompts now, or with dynamic sampling when the batch before it is finished."""
        rollout = self._config.rollout
        if rollout.dynamic_sampling:
            return self._start(lambda: self._with_spread(iteration, on_done))
        prompts = self._cursor.take(rollout.prompts)
        cursor = self._cursor.state()

        def generate() -> Batch:
            sampled, seconds = self._sample(prompts, iteration, on_done)
            return Batch(*sampled, cursor, {"time/scoring_s": seconds})

        return self._start(generate)

    def _start(self, work: Callable[[], Batch]) -> Future[Batch]:
        return self._threads.submit(work) if self._threads else _now(work)

    def _with_spread(self, iteration: int, on_done: OnDone | None) -> Batch:
        rollout, seconds = self._config.rollout, 0.0

        def sample(prompts: list[Prompt]) -> Sampled:
            nonlocal seconds
            sampled, more = self._sample(prompts, iteration, on_done)
            seconds += more
            return sampled

        chosen, figures = sample_with_spread(
            self._cursor.take, sample, groups=rollout.prompts, rounds=rollout.max_rounds
        )
        return Batch(*chosen, self._cursor.state(), figures | {"time/scoring_s": seconds})

    def _sample(
        self, prompts: list[Prompt], iteration: int, on_done: OnDone | None
    ) -> tuple[Sampled, float]:
        """Trajectories and scores of some prompts, and the seconds that scoring took."""

        def ask(asked: Sequence[Prompt]) -> list[Trajectory]:
            return collect(
                self._engine,
                asked,
                self._stage,
                samples=self._config.rollout.samples,
                sampling=self._sampling,
                seed=rollout_seed(self._config.seed, iteration),
                on_done=on_done,
            )

        return sample_shared(
            self._peers,
            f"rollouts of iteration {iteration}",
            prompts,
            ask,
            self._score,
            collective=self._peers.count > 1 and not self._engine.concurrent,
        )


def _now(work: Callable[[], Any]) -> Future[Any]:
    """A finished future: the synchronous case, in the caller's thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future
