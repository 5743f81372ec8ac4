"""Prompts without spread are replaced: which ones, how often, what the batch holds in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.config import Config, RolloutConfig
from jaxrl.cursor import PromptCursor
from jaxrl.dynamic_sampling import Sampled, has_spread, sample_with_spread
from jaxrl.rollout.engine import LeftOut
from jaxrl.rollouts import Batch, Rollouts
from jaxrl.scoring import Scores
from jaxrl.types import Prompt, Sampling, Trajectory

SAMPLING = Sampling(max_new_tokens=2)
PROMPTS = [Prompt(row=i, ids=(i + 1,), text="", columns={}) for i in range(10)]


def say(prompt: Prompt, sample: int, rewards: tuple[float, ...] = ()) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        sample=sample,
        response_ids=(1, 2),
        logprobs=(0.0, 0.0),
        finish_reason="stop",
        rewards=rewards,
    )


class Engine:
    """Two samples a prompt; some prompts are left out."""

    concurrent = False

    def __init__(self, left_out: Sequence[int] = ()) -> None:
        self.left_out = left_out
        self.asked: list[list[int]] = []
        self.hold: Callable[[list[int]], None] = lambda rows: None

    def generate(self, prompts: Sequence[Prompt], **_: Any) -> list[Trajectory]:
        rows = [prompt.row for prompt in prompts]
        self.hold(rows)
        self.asked.append(rows)
        said = [say(p, i) for p in prompts if p.row not in self.left_out for i in range(2)]
        if not said:
            raise LeftOut("none came back")
        return said


def scored(spread: Sequence[int]) -> Callable[[Sequence[Trajectory]], Scores]:
    """Score row + sample for rows in `spread`, else the row's number alone."""

    def score(trajectories: Sequence[Trajectory]) -> Scores:
        values = [t.prompt.row + t.sample * (t.prompt.row in spread) for t in trajectories]
        ones = np.ones(len(values), bool)
        return Scores(np.array(values, np.float32), ones, {"f": np.array(values, np.float32)})

    return score


def rollouts_of(
    spread: Sequence[int],
    *,
    prompts: int = 2,
    rounds: int = 3,
    staleness: int = 0,
    engine: Any = None,
    cursor: PromptCursor | None = None,
    iterations: int = 6,
) -> tuple[Rollouts, Any]:
    rollout = RolloutConfig(
        prompts=prompts,
        samples=2,
        dynamic_sampling=True,
        max_rounds=rounds,
        max_staleness=staleness,
    )
    config = Config(seed=3, iterations=iterations, rollout=rollout)
    engine = engine or Engine()
    cursor = cursor or PromptCursor(PROMPTS, seed=0, shuffle=False)
    return Rollouts(config, engine, cursor, SAMPLING, scored(spread)), engine


def rows(batch: Batch) -> list[int]:
    return [prompt.row for prompt in batch.prompts]


def matches(batch: Batch) -> None:
    """Trajectories and scores belong to the prompts, each with both samples."""
    wanted = [(p.row, p.epoch, sample) for p in batch.prompts for sample in range(2)]
    got = [(t.prompt.row, t.prompt.epoch, t.sample) for t in batch.trajectories]
    assert got == wanted
    assert [int(v) for v in batch.scores.values - [s for *_, s in got]] == [
        row - (sample if not spread else 0)
        for (row, _, sample), spread in zip(
            got, np.repeat(batch.scores.values[1::2] > batch.scores.values[::2], 2), strict=True
        )
    ]
    np.testing.assert_array_equal(batch.scores.per_function["f"], batch.scores.values)
    assert len(batch.scores.valid) == len(batch.trajectories)


def test_flat_groups_are_replaced_by_the_next_prompts():
    rollouts, engine = rollouts_of(spread=[1, 3, 5, 6])
    batch = rollouts.take(0)
    assert engine.asked == [[0, 1], [2], [3]]
    assert rows(batch) == [1, 3]
    matches(batch)
    assert batch.cursor["position"] == 4
    assert batch.figures["rollout/rounds"] == 3.0
    assert batch.figures["rollout/flat_groups"] == batch.figures["rollout/dropped_groups"] == 2.0
    assert batch.figures["reward/sampled_mean"] == pytest.approx(
        (0 + 0 + 1 + 2 + 2 + 2 + 3 + 4) / 8
    )
    assert rows(rollouts.take(1)) == [5, 6]
    assert engine.asked[3:] == [[4, 5], [6]]


def test_after_the_last_round_flat_groups_fill_up_in_the_order_they_came():
    rollouts, engine = rollouts_of(spread=[4], prompts=3, rounds=2)
    batch = rollouts.take(0)
    assert engine.asked == [[0, 1, 2], [3, 4, 5]]
    assert rows(batch) == [0, 1, 4]
    matches(batch)
    assert batch.figures["rollout/rounds"] == 2.0
    assert batch.figures["rollout/flat_groups"] == 5.0
    assert batch.figures["rollout/dropped_groups"] == 3.0


def test_spread_is_of_totals_of_valid_samples():
    prompt = PROMPTS[0]

    def group(
        values: Sequence[float],
        valid: Sequence[bool] = (True, True),
        rewards: Sequence[tuple[float, ...]] = ((), ()),
        tokens: tuple[Any, ...] = (),
    ) -> Sampled:
        said = [say(prompt, i, r) for i, r in enumerate(rewards)]
        return Sampled(
            [prompt], said, Scores(np.array(values, np.float32), np.array(valid), {}, tokens)
        )

    assert has_spread(group([0, 1])) and not has_spread(group([1, 1]))
    assert not has_spread(group([0, 1], valid=[True, False]))
    assert not has_spread(group([0, 1], valid=[False, False]))
    assert has_spread(group([1, 1], rewards=[(0.0, 0.5), ()]))
    assert not has_spread(group([1, 0.5], rewards=[(), (0.5, 0.0)]))
    assert has_spread(group([1, 1], tokens=(np.array([0.0, 0.25]), None)))


def test_token_rewards_stay_with_their_trajectories():
    """A round whose sources gave none is joined with one that has some."""

    def sample(prompts: list[Prompt]) -> Sampled:
        said = [say(p, i) for p in prompts for i in range(2)]
        values = np.array([t.prompt.row + t.sample * (t.prompt.row % 2) for t in said], np.float32)
        tokens = tuple(np.full(2, 10.0 * t.prompt.row + t.sample) for t in said)
        valid = np.array([t.prompt.row != 1 for t in said])
        return Sampled(prompts, said, Scores(values, valid, {}, tokens if prompts[0].row else ()))

    cursor = PromptCursor(PROMPTS, seed=0, shuffle=False)
    got, _ = sample_with_spread(cursor.take, sample, groups=2, rounds=3)
    assert [p.row for p in got.prompts] == [2, 3]  # rows 0 and 1 came first, without any
    found = [entry.tolist() for entry in got.scores.tokens if entry is not None]
    assert found == [[20.0, 20.0], [21.0, 21.0], [30.0, 30.0], [31.0, 31.0]]
    assert got.scores.valid.tolist() == [True] * 4
    cursor = PromptCursor(PROMPTS[:4], seed=0, shuffle=False)
    got, _ = sample_with_spread(cursor.take, sample, groups=4, rounds=1)
    assert got.scores.valid.tolist() == [True, True, False, False, True, True, True, True]


def test_rounds_without_token_rewards_have_none():
    def sample(prompts: list[Prompt]) -> Sampled:
        said = [say(p, i) for p in prompts for i in range(2)]
        values = np.array([t.sample * (t.prompt.row in (1, 2)) for t in said], np.float32)
        tokens = tuple(np.full(2, 0.0) for _ in said) if prompts[0].row else ()
        return Sampled(prompts, said, Scores(values, np.ones(len(said), bool), {}, tokens))

    cursor = PromptCursor(PROMPTS, seed=0, shuffle=False)
    got, _ = sample_with_spread(cursor.take, sample, groups=2, rounds=3)
    assert [p.row for p in got.prompts] == [1, 2]
    assert got.scores.tokens[:2] == (None, None)
    assert all(entry is not None for entry in got.scores.tokens[2:])


def test_prompts_that_are_left_out_are_replaced_and_fill_nothing():
    """Refused ones count as missing; a round of which nothing comes back does not end the run."""
    rollouts, engine = rollouts_of(spread=[0, 2, 3], engine=Engine(left_out=[0, 3, 4]))
    batch = rollouts.take(0)
    assert engine.asked == [[0, 1], [2, 3], [4]]
    assert rows(batch) == [1, 2]
    assert batch.cursor["position"] == 5
    matches(batch)
    with pytest.raises(LeftOut):
        rollouts_of(spread=[], engine=Engine(left_out=range(10)))[0].take(0)


def test_no_prompt_is_lost_at_the_end_of_an_epoch():
    """Ten prompts, shuffled, some flat: each is asked once before any is asked again."""
    cursor = PromptCursor(PROMPTS, seed=1)
    rollouts, engine = rollouts_of(spread=[1, 2, 5, 7, 8], prompts=3, cursor=cursor)
    for iteration in range(6):
        matches(rollouts.take(iteration))
    asked = [row for rows in engine.asked for row in rows]
    assert len(asked) > 20
    assert sorted(asked[:10]) == sorted(asked[10:20]) == list(range(10))
    assert asked[:10] != asked[10:20]


@pytest.mark.parametrize("staleness", [1, 3])
def test_ahead_the_prompts_are_those_of_a_run_in_step(staleness: int):
    """Whichever batch is faster: the next one takes its prompts when this one has all of its."""
    spread = [1, 3, 5, 6, 9]
    in_step = rollouts_of(spread)[0]
    wanted = [in_step.take(i) for i in range(6)]
    engine = Engine()
    engine.hold = lambda rows: time.sleep(0.05 if len(rows) == 1 else 0.0)
    ahead, _ = rollouts_of(spread, staleness=staleness, engine=engine)
    got = [ahead.take(i) for i in range(6)]
    ahead.close()
    assert [rows(batch) for batch in got] == [rows(batch) for batch in wanted]
    assert [batch.cursor for batch in got] == [batch.cursor for batch in wanted]
    # Resumed from any of these places, the rest is the same.
    for done in range(1, 6):
        cursor = PromptCursor(PROMPTS, seed=0, shuffle=False)
        cursor.restore(got[done - 1].cursor)
        again, _ = rollouts_of(spread, staleness=staleness, cursor=cursor)
        assert [rows(again.take(i)) for i in range(done, 6)] == [rows(b) for b in wanted[done:]]
        again.close()


def test_the_next_batch_is_under_way_while_this_one_is_trained():
    engine = Engine()
    rollouts, _ = rollouts_of(range(10), staleness=1, engine=engine)
    rollouts.take(0)
    rollouts._begun[0][1].result(timeout=30)
    assert engine.asked == [[0, 1], [2, 3]]
    rollouts.close()
