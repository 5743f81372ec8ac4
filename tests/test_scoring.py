"""Scores: what reward functions may return, how it is added up, and what is found at the start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxrl.errors import RewardError
from jaxrl.scoring import Scores, total_scores
from jaxrl.types import Prompt, Trajectory
from tests.scored_functions import reward_modules, run, scorer


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with reward_modules(tmp_path_factory.mktemp("rewards")):
        yield


def test_scores_are_weighted_sums_in_float32() -> None:
    with scorer("length", "array", length=0.5, array=-2.0) as s:
        scores = run(s, "a", "bb", "ccc", "")
    assert scores.values.dtype == np.float32 and scores.valid.dtype == bool
    np.testing.assert_array_equal(scores.values, [0.5, 1 - 2, 1.5 - 4, -6])
    assert scores.valid.all()
    np.testing.assert_array_equal(scores.per_function["my_rewards:length"], [1, 2, 3, 0])
    np.testing.assert_array_equal(scores.per_function["my_rewards:array"], [0, 1, 2, 3])


def test_arguments_are_lists_with_an_entry_a_completion_and_gaps_are_none() -> None:
    prompts = [
        Prompt(row=0, ids=(1,), text="pp", columns={"gain": 3}),
        Prompt(row=1, ids=(1,), text="p", columns={"other": 1}),
    ]
    with scorer("column") as s:
        scores = s.score(prompts, ["x", "y"], [(5, 6), (5,)])
    np.testing.assert_array_equal(scores.values, [2 + 20 + 300, 1 + 10 + 0])


def test_number_types_are_taken_and_strings_are_not() -> None:
    with scorer("kinds") as s:
        np.testing.assert_array_equal(run(s, "a", "b", "c", "d").values, [1, 1, 0.5, 2])
    with (
        scorer("text") as s,
        pytest.raises(RewardError, match=r"my_rewards:text .*'1' \(str\).* 3"),
    ):
        run(s, "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("one", "1 values"),
        ("three", "3 values"),
        ("five", "5 values"),
        ("scalar", "one float"),
        ("mapping", "a dict"),
        ("string", "a str"),
        ("nothing", "one NoneType"),
    ],
)
def test_the_wrong_number_of_values_is_refused(name: str, given: str) -> None:
    with (
        scorer(name) as s,
        pytest.raises(RewardError, match=f"{name} returned {given} for 4 compl"),
    ):
        run(s, "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("name", "completions", "message"),
    [
        ("short", ("a", "bb"), "short returned 1 numbers for the 2 tokens of completion 1"),
        ("table", ("a",), r"table returned .* \(ndarray\) for completion 0"),
        ("text_token", ("ab",), r"'x' \(str\) for token 1 of completion 0"),
    ],
)
def test_lists_have_a_number_a_token(name: str, completions: tuple[str, ...], message: str) -> None:
    with scorer(name) as s, pytest.raises(RewardError, match=message):
        run(s, *completions)


def test_rewards_of_tokens_are_kept_apart_from_the_score_and_weighted_alike() -> None:
    with scorer("steps", "length", "array_steps", steps=2.0, length=0.5, array_steps=-10.0) as s:
        scores = run(s, "a", "bb", "ccc")
    # steps: 0.5, [0, 1], [0, 1, 2]; array_steps: [0], [0, 1], [0, 1, 2]
    np.testing.assert_array_equal(scores.values, [2 * 0.5 + 0.5, 1.0, 1.5])
    assert [None if t is None else t.tolist() for t in scores.tokens] == [
        [0],
        [0, -8],
        [0, -8, -16],
    ]
    assert all(t is None or t.dtype == np.float32 for t in scores.tokens)
    np.testing.assert_array_equal(scores.per_function["my_rewards:steps"], [0.5, 1, 3])
    with scorer("steps") as s:
        first, second = run(s, "a", "bb").tokens
        assert first is None and second is not None and second.tolist() == [0, 1]
        assert run(s, "a").tokens == ()  # none has any


def test_a_token_without_a_finite_reward_makes_the_completion_invalid() -> None:
    with scorer("gaps", "length", on_invalid="drop") as s:
        scores = run(s, "aa", "bb", "cc", "dd")
    assert scores.valid.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(scores.values, [0, 0, 5, 2])
    assert [t is None for t in scores.tokens] == [True, True, True, False]
    np.testing.assert_array_equal(scores.per_function["my_rewards:gaps"], [np.nan, np.nan, 3, 3])
    with (
        scorer("gaps") as s,
        pytest.raises(RewardError, match="None for token 1 of completion 0, row 10.*2 of 4"),
    ):
        run(s, "aa", "bb", "cc", "dd")


def test_an_invalid_completion_has_no_token_rewards() -> None:
    with scorer("bad", "array_steps", on_invalid="drop") as s:
        scores = run(s, "a", "b", "c", "d")
    assert scores.valid.tolist() == [True, False, False, False]
    assert [t is None for t in scores.tokens] == [False, True, True, True]


def test_weighted_token_rewards_beyond_float32_are_invalid() -> None:
    with scorer("huge_steps", on_invalid="drop", huge_steps=10.0) as s:
        scores = run(s, "aa")
        assert not scores.valid.any() and scores.tokens == ()
    with (
        scorer("huge_steps", huge_steps=10.0) as s,
        pytest.raises(RewardError, match=r"weighted sum .* of tokens returned 1e\+39 for token 0"),
    ):
        run(s, "aa")


def test_a_trajectory_is_worth_all_its_rewards() -> None:
    def trajectory(*rewards: float) -> Trajectory:
        prompt = Prompt(row=0, ids=(1,), text="p", columns={})
        return Trajectory(
            prompt=prompt,
            sample=0,
            response_ids=(5, 6),
            logprobs=(0.0, 0.0),
            finish_reason="stop",
            rewards=rewards,
        )

    scores = Scores(
        np.array([1.0, 2.0], np.float32),
        np.ones(2, bool),
        {},
        (None, np.array([10.0, 20.0], np.float32)),
    )
    totals = total_scores([trajectory(), trajectory(0.5, 0.25)], scores)
    assert totals.tolist() == [1.0, 32.75]


def test_invalid_values_stop_the_run_and_name_the_prompt() -> None:
    with scorer("length", "bad") as s:
        with pytest.raises(
            RewardError, match=r"bad returned None for completion 1, row 11, prompt 'pp'"
        ):
            run(s, "a", "b", "c", "d")
        with pytest.raises(RewardError, match=r"3 of 4 completions.*reward.on_invalid=drop"):
            run(s, "a", "b", "c", "d")


def test_invalid_values_are_dropped_when_asked() -> None:
    with scorer("length", "bad", on_invalid="drop") as s:
        scores = run(s, "a", "b", "c", "d")
    np.testing.assert_array_equal(scores.valid, [True, False, False, False])
    np.testing.assert_array_equal(scores.values, [2, 0, 0, 0])
    np.testing.assert_array_equal(
        scores.per_function["my_rewards:bad"], [1, np.nan, np.nan, np.nan]
    )
    np.testing.assert_array_equal(scores.per_function["my_rewards:length"], [1, 1, 1, 1])


def test_a_score_beyond_float32_is_invalid() -> None:
    with scorer("huge", on_invalid="drop") as s:
        assert not run(s, "a").valid.any()
    with scorer("huge") as s, pytest.raises(RewardError, match=r"huge returned 1e\+300"):
        run(s, "a")
    with (
        scorer("length", length=1e39) as s,
        pytest.raises(RewardError, match=r"weighted sum .* 1e\+39"),
    ):
        run(s, "a")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module_here:f", "No module named"),
        ("my_rewards:missing", "has nothing called missing"),
        ("my_rewards:not_callable", "is int, not a function"),
        ("broken_rewards:f", "no_such_package"),
        ("my_rewards:", "module:function"),
    ],
)
def test_functions_are_found_at_the_start_or_not_at_all(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=rf"reward.functions\[1\].fn='{name}'.*{reason}"):
        scorer("length", name)


def test_a_module_may_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text("def f(*, completions, **_): return [4.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with scorer("rewards_here:f") as s:
        assert run(s, "a").values == [4.0]


def test_probe_finds_faults_before_the_first_rollout() -> None:
    prompts = [Prompt(row=i, ids=(1,), text="p", columns={}) for i in range(3)]
    with scorer("column") as s, pytest.raises(RewardError, match="TypeError.*gain"):
        s.probe(prompts)
    with scorer("five") as s, pytest.raises(RewardError, match="5 values for 2 completions"):
        s.probe(prompts)
    with scorer("bad") as s:
        s.probe(prompts)  # None is a matter for reward.on_invalid
        with pytest.raises(RewardError):
            run(s, "a", "b")


def test_columns_that_cannot_be_sent_are_named() -> None:
    with scorer("length") as s, pytest.raises(RewardError, match="columns cannot be sent"):
        run(s, "a", columns={"f": lambda: None})


def test_unequal_arguments_are_refused() -> None:
    with scorer("length") as s, pytest.raises(ValueError, match="equally many"):
        s.score([], ["a"], [[1]])


def test_without_any_source_every_score_is_a_valid_zero() -> None:
    with scorer() as s:
        scores = run(s, "a", "b")
        s.probe([])
    assert scores.values.tolist() == [0, 0] and scores.valid.all()
    assert scores.per_function == {} and scores.tokens == ()


def test_no_completions_give_no_scores() -> None:
    with scorer("one") as s:
        scores = run(s)
    assert scores.values.shape == scores.valid.shape == (0,)
    assert scores.per_function["my_rewards:one"].shape == (0,)
