"""From raw scores and finish reasons to what is trained on: who takes part, and with what score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.outcomes import judge, rewarded
from jaxrl.rollouts import Batch
from jaxrl.scoring import Scores, total_scores
from jaxrl.types import FinishReason, Prompt, Trajectory

ITERATION = 7


def settings(*overrides: str) -> Config:
    base = ("model.path=x", "rollout.prompts=2", "rollout.samples=3", "rollout.max_new_tokens=8")
    return load_config([], [*base, *overrides])


def response(
    row: int, sample: int, length: int, finish: FinishReason, version: int = ITERATION, **more: Any
) -> Trajectory:
    return Trajectory(
        prompt=Prompt(row=row, ids=(1,), text="", columns={}),
        sample=sample,
        response_ids=(2,) * length,
        logprobs=(-1.0,) * length,
        finish_reason=finish,
        weight_version=version,
        **more,
    )


TRAJECTORIES = [
    response(5, 0, 3, "stop"),
    response(5, 1, 8, "length"),
    response(5, 2, 7, "stop"),
    response(4, 0, 8, "length"),
    response(4, 1, 2, "stop"),
    response(4, 2, 6, "stop"),
]
VALUES = np.array([1.0, 2.0, 3.0, 4.0, 0.0, 6.0], np.float32)
VALID = np.array([True, True, True, True, False, True])


def batch(trajectories: list[Trajectory] = TRAJECTORIES, **scores: Any) -> Batch:
    n = len(trajectories)
    given = Scores(VALUES[:n], VALID[:n], {}, **scores)
    return Batch([t.prompt for t in trajectories[::3]], trajectories, given, {}, {})


def outcomes_of(*overrides: str, of: Batch | None = None, moments: Any = (0, 0, 0)) -> Any:
    moments = np.array(moments, np.float32)
    return judge(settings(*overrides), ITERATION, of or batch(), moments)


@pytest.mark.parametrize(
    ("overrides", "scores", "kept"),
    [
        ((), [1, 2, 3, 4, 6], [0, 1, 2, 3, 5]),
        (("algorithm.truncated=zero",), [1, 0, 3, 0, 6], [0, 1, 2, 3, 5]),
        (("algorithm.truncated=bootstrap",), [1, 0, 3, 0, 6], [0, 1, 2, 3, 5]),
        (("algorithm.truncated=mask",), [1, 3, 6], [0, 2, 5]),
        # Limit 8, buffer 4: length 8 pays 1, 7 pays .75, 6 pays .5.
        (
            ("algorithm.truncated=soft", "algorithm.overlong_buffer=4"),
            [1, 1, 2.25, 3, 5.5],
            [0, 1, 2, 3, 5],
        ),
        (
            ("algorithm.missing_eos_penalty=0.5", "reward.scale=10", "reward.shift=1"),
            [11, 20.5, 31, 40.5, 61],
            [0, 1, 2, 3, 5],
        ),
        (("reward.clip=3",), [1, 2, 3, 3, 3], [0, 1, 2, 3, 5]),
    ],
)
def test_final_scores_and_who_takes_part(
    overrides: tuple[str, ...], scores: list[float], kept: list[int]
) -> None:
    """GAE-05: cut off is who the engine says was cut off, whatever the lengths."""
    outcomes, usable, moments = outcomes_of(*overrides)
    assert np.flatnonzero(usable).tolist() == kept
    missing = [0.0] * (6 - len(kept))  # up to a fixed length, so that nothing compiles anew
    np.testing.assert_allclose(outcomes.scores, scores + missing, atol=1e-6)
    groups = np.array([0, 0, 0, 1, 1, 1])[kept]
    np.testing.assert_array_equal(outcomes.groups[: len(kept)], groups)
    cut = np.array([False, True, False, True, False, False])[kept]
    np.testing.assert_array_equal(outcomes.truncated[: len(kept)], cut)
    assert (moments == 0).all()


def test_good_responses_are_those_of_the_raw_score_with_all_rewards() -> None:
    """Neither scaling nor the rule for truncated ones decides what is imitated."""
    of = batch(
        [response(5, 0, 3, "stop", rewards=(0.0, 0.0, 2.5)), *TRAJECTORIES[1:]],
        tokens=(None, None, np.array([0.0] * 6 + [-2.0]), None, None, None),
    )
    overrides = ("algorithm.nll_coef=1", "algorithm.nll_above=2.5", "algorithm.truncated=zero")
    outcomes, *_ = outcomes_of(*overrides, "reward.scale=-1", of=of)
    # Totals 3.5, 2, 1, 4, (invalid), 6.
    np.testing.assert_array_equal(outcomes.positive[:5], [True, False, False, True, True])
    np.testing.assert_allclose(
        total_scores(of.trajectories, of.scores), [3.5, 2, 1, 4, 0, 6], atol=1e-6
    )


def test_rewards_of_environment_and_functions_are_added_and_scaled_token_by_token() -> None:
    of = batch(
        [response(5, 0, 3, "stop", rewards=(1.0, 0.0, 0.5)), *TRAJECTORIES[1:]],
        tokens=(np.array([0.0, 2.0, -0.5]), np.arange(8.0), None, None, None, None),
    )
    got = rewarded(settings("reward.scale=2"), of)
    assert got[0].rewards == (2.0, 4.0, 0.0)
    assert got[1].rewards == tuple(2.0 * np.arange(8))
    assert [t.rewards for t in got[2:]] == [()] * 4
    assert [t.response_ids for t in got] == [t.response_ids for t in of.trajectories]


def test_running_moments_count_the_batch_and_go_on_from_those_before() -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0, 6.0])
    outcomes, _, moments = outcomes_of("reward.normalise=mean_std")
    np.testing.assert_allclose(moments, [5, 3.2, 5 * first.var()], rtol=1e-6)
    np.testing.assert_allclose(outcomes.scores[:5], (first - 3.2) / first.std(), rtol=1e-5)
    again, _, moments = outcomes_of("reward.normalise=std", moments=moments)
    np.testing.assert_allclose(moments[0], 10)
    np.testing.assert_allclose(again.scores[:5], first / first.std(), rtol=1e-5)


def test_what_is_too_old_takes_no_part() -> None:
    old = [response(5, i, 3, "stop", version=ITERATION - i) for i in range(3)]
    served = ("rollout.engine=sglang", "rollout.urls=[http://a:1]", "algorithm.importance=token")
    for staleness, expected in ((0, [0]), (1, [0, 1]), (2, [0, 1, 2])):
        overrides = (f"rollout.max_staleness={staleness}", *served)
        _, usable, _ = outcomes_of(*overrides, of=batch(old))
        assert np.flatnonzero(usable).tolist() == expected
