"""When batches begin: staleness, drains, order, and what a checkpoint would save.

The engine here only records who asked for what and when it was let go: which weights a batch begins
with follows from that alone. Real servers are in tests/rollout/sglang.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.config import CheckpointConfig, Config, EvalConfig, RolloutConfig
from jaxrl.cursor import PromptCursor
from jaxrl.errors import RolloutError
from jaxrl.rollouts import Rollouts, is_due, rollout_seed
from jaxrl.scoring import Scores
from jaxrl.types import Prompt, Sampling, Trajectory

PROMPTS = [Prompt(row=i, ids=(i + 1,), text="", columns={}) for i in range(6)]
SAMPLING = Sampling(max_new_tokens=1)


class Recorder:
    """Answers with the version at the time of asking, once `go` is set."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[tuple[int, int]] = []  # (seed, version)
        self.threads: set[int] = set()
        self.go = threading.Event()
        self.go.set()
        self.fail = False

    def generate(self, prompts: Sequence[Prompt], *, seed: int, **_: Any) -> list[Trajectory]:
        version = self.version
        self.asked.append((seed, version))
        self.threads.add(threading.get_ident())
        assert self.go.wait(30)
        if self.fail:
            raise RolloutError("all servers are gone")
        return [
            Trajectory(
                prompt=prompt,
                sample=0,
                response_ids=(1,),
                logprobs=(0.0,),
                finish_reason="stop",
                weight_version=version,
            )
            for prompt in prompts
        ]


def unscored(trajectories: Sequence[Trajectory]) -> Scores:
    return Scores(np.zeros(len(trajectories), np.float32), np.ones(len(trajectories), bool), {})


def config(
    staleness: int, *, evaluate: int = 0, checkpoint: int = 0, iterations: int = 8
) -> Config:
    return Config(
        seed=5,
        iterations=iterations,
        rollout=RolloutConfig(prompts=2, samples=1, max_staleness=staleness),
        eval=EvalConfig(every=evaluate),
        checkpoint=CheckpointConfig(every=checkpoint),
    )


def until_asked(engine: Recorder, count: int) -> None:
    """A batch begins in a thread of its own, which may be late."""
    deadline = time.monotonic() + 30
    while len(engine.asked) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def train(settings: Config, first: int = 0, cursor: dict[str, int] | None = None) -> Any:
    """The loop's calls alone: take, publish. Gives staleness and rows an iteration, and places."""
    engine, prompts = Recorder(), PromptCursor(PROMPTS, seed=settings.seed)
    engine.version = first
    if cursor:
        prompts.restore(cursor)
    rollouts = Rollouts(settings, engine, prompts, SAMPLING, unscored)  # type: ignore[arg-type]
    ages, rows, places = [], [], []
    for iteration in range(first, settings.iterations):
        batch = rollouts.take(iteration)
        begun = iteration - first + 1 + len(rollouts._begun)
        until_asked(engine, begun)
        ages.append(iteration - batch.trajectories[0].weight_version)
        rows.append([prompt.row for prompt in batch.prompts])
        places.append(batch.cursor)
        engine.version = iteration + 1
    rollouts.close()
    return ages, rows, places, engine


def test_synchronous_batches_are_of_the_newest_weights_and_in_this_thread():
    ages, _, _, engine = train(config(0))
    assert ages == [0] * 8
    assert engine.threads == {threading.get_ident()}
    assert [seed for seed, _ in engine.asked] == [rollout_seed(5, i) for i in range(8)]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_batches_begin_at_most_that_many_versions_early(staleness: int):
    ages, rows, _, engine = train(config(staleness))
    assert max(ages) == staleness and ages[0] == 0
    assert ages[staleness:] == [staleness] * (8 - staleness)
    assert rows == train(config(0))[1]  # the same prompts in the same iterations
    assert sorted(s for s, _ in engine.asked) == sorted(rollout_seed(5, i) for i in range(8))


@pytest.mark.parametrize("what", ["evaluate", "checkpoint"])
def test_nothing_is_under_way_at_an_evaluation_or_checkpoint(what: str):
    settings = config(2, **{what: 3})
    ages = train(settings)[0]
    # Iterations 0-2, then what is due after the third, then 3-5, and so on.
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_resumed_run_asks_for_what_an_uninterrupted_one_asks_for():
    settings = config(2, checkpoint=3)
    ages, rows, places, engine = train(settings)
    again = train(settings, first=3, cursor=places[2])
    assert again[0] == ages[3:] and again[1] == rows[3:] and again[2] == places[3:]
    later = {rollout_seed(5, i) for i in range(3, 8)}
    assert sorted(again[3].asked) == sorted(a for a in engine.asked if a[0] in later)


def test_what_a_stopped_run_saves_knows_nothing_of_batches_begun_ahead():
    """Killed at any iteration, the next one's prompts come next: none lost, none twice."""
    _, rows, places, _ = train(config(3))
    for iteration in range(7):
        cursor = PromptCursor(PROMPTS, seed=5)
        cursor.restore(places[iteration])
        assert [prompt.row for prompt in cursor.take(2)] == rows[iteration + 1]


def test_the_next_batch_is_generated_while_the_trainer_works():
    engine, settings = Recorder(), config(1)
    rollouts = Rollouts(settings, engine, PromptCursor(PROMPTS, seed=0), SAMPLING, unscored)  # type: ignore[arg-type]
    rollouts.take(0)
    rollouts._begun[0][1].result(timeout=30)  # batch 1 was begun with it and is finished
    engine.go.clear()
    taken = threading.Thread(target=rollouts.take, args=(1,))
    taken.start()
    taken.join(30)
    assert not taken.is_alive()  # batch 1 did not wait for batch 2, which is under way and blocked
    until_asked(engine, 3)
    assert not rollouts._begun[0][1].done()
    engine.go.set()
    rollouts.close()


def test_an_error_of_a_batch_ahead_is_raised_where_that_batch_is_taken():
    engine, settings = Recorder(), config(1)
    rollouts = Rollouts(settings, engine, PromptCursor(PROMPTS, seed=0), SAMPLING, unscored)  # type: ignore[arg-type]
    engine.go.clear()
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(_caught(rollouts, 0)))
    thread.start()
    engine.fail = True
    engine.go.set()
    thread.join(30)
    assert isinstance(taken[0], RolloutError)
    with pytest.raises(RolloutError, match="all servers are gone"):
        rollouts.take(1)
    rollouts.close()


def _caught(rollouts: Rollouts, iteration: int) -> Exception | None:
    try:
        rollouts.take(iteration)
    except RolloutError as error:
        return error
    return None


def test_due_points():
    assert [is_due(3, done, 8) for done in range(1, 9)] == [
        *(False, False, True, False, False, True, False, True)
    ]
    assert [is_due(0, done, 3) for done in range(1, 4)] == [False, False, True]


def test_groups_and_ages_of_a_batch_with_holes():
    from jaxrl.iteration import _provenance
    from jaxrl.outcomes import _groups, too_old
    from jaxrl.rollouts import Batch

    prompts = [PROMPTS[4], dataclasses.replace(PROMPTS[4], epoch=1), PROMPTS[1]]

    def sampled(prompt: Prompt, version: int, versions: tuple[int, ...] = ()) -> Trajectory:
        return Trajectory(
            prompt=prompt,
            sample=0,
            response_ids=(1, 2),
            logprobs=(0.0, 0.0),
            finish_reason="stop",
            weight_version=version,
            token_versions=versions,
        )

    trajectories = [
        sampled(prompts[0], 7),
        sampled(prompts[2], 6, (6, 7)),  # nothing came back for the prompt between
        sampled(prompts[2], 4),
        sampled(prompts[2], 5),  # exactly as old as is allowed
    ]
    batch = Batch(prompts, trajectories, unscored(trajectories), {}, {})
    assert _groups(batch).tolist() == [0, 2, 2, 2]
    settings = config(2)
    assert too_old(settings, 7, trajectories).tolist() == [False, False, True, False]
    figures = _provenance(settings, 7, trajectories)
    assert figures["rollout/staleness_max"] == 3.0
    assert figures["rollout/staleness_mean"] == pytest.approx((0 + 0 + 1 + 0 + 3 + 3 + 2 + 2) / 8)
    assert figures["rollout/too_old"] == 1.0
