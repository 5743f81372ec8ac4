"""Built-in reward functions on texts a model writes."""

from __future__ import annotations

import pytest

from jaxrl.reward_functions import (
    exact_match,
    last_number,
    math_verify_reward,
    reasoning_gym_score,
)


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("The answer is 8.", 8, 1.0),
        ("8", "8.0", 1.0),
        ("8 + 8 = 16, not 17", "16", 0.0),
        ("first 7, then 12", 12, 1.0),
        ("total 1,234,567", 1234567, 1.0),
        ("1,234.50 dollars", "1234.5", 1.0),
        ("numbers 3, 4", 4, 1.0),
        ("pair 1,2", 2, 1.0),
        ("temperature −4", -4, 1.0),
        ("= -4", "-4", 1.0),
        ("= -4", "4", 0.0),
        ("10-4", 4, 1.0),
        ("it is +5", 5, 1.0),
        ("$5.00", 5, 1.0),
        ("about .5", 0.5, 1.0),
        ("x=-.5", -0.5, 1.0),
        (r"\boxed{12}", 12, 1.0),
        ("**12**", 12, 1.0),
        ("0.1 + 0.2 = 0.3", "0.3", 1.0),  # decimals are exact
        ("9007199254740993", 9007199254740992, 0.0),  # as are integers beyond 2 ** 53
        ("no number here", 0, 0.0),
        ("", 0, 0.0),
        ("so 18", "He makes 9 * 2 = <<9*2=18>>18 dollars.\n#### 18", 1.0),
        ("in 2024", 2024, 1.0),
    ],
)
def test_last_number(completion: str, answer: object, score: float) -> None:
    assert last_number(prompts=["?"], completions=[completion], answer=[answer], extra=[1]) == [
        score
    ]


def test_last_number_keeps_the_order_and_needs_an_answer() -> None:
    assert last_number(completions=["1", "2", "3"], answer=[1, 0, 3]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="completion 1 holds no number: None"):
        last_number(completions=["1", "2"], answer=[1, None])
    with pytest.raises(ValueError):
        last_number(completions=["1", "2"], answer=[1])


def test_exact_match() -> None:
    given = [" fedcba\n", "fedcb", "Fedcba", "12"]
    assert exact_match(completions=given, answer=["fedcba"] * 3 + [12], ids=[0] * 4) == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("$0.5$", "1/2", 1.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("it is $x + 1$", "1 + x", 1.0),
        ("$x - 1$", "1 + x", 0.0),
        ("it is $x + 1$", "$1 + x$", 1.0),
        ("it is 3/4", r"\boxed{0.75}", 1.0),
        ("it is 1,234", "1234", 1.0),
        ("no idea", "2", 0.0),
        ("the answer is 7.", 7, 1.0),
    ],
)
def test_math_verify(completion: str, answer: object, score: float) -> None:
    assert math_verify_reward(completions=[completion], answer=[answer]) == [score]


def test_math_verify_names_an_unreadable_answer() -> None:
    with pytest.raises(ValueError, match="completion 0: ''"):
        math_verify_reward(completions=["1"], answer=[""])


def test_reasoning_gym_scores_with_the_scorer_of_the_rows_own_dataset() -> None:
    import reasoning_gym

    sums = reasoning_gym.create_dataset("chain_sum", size=2, seed=3)
    spelled = reasoning_gym.create_dataset("spell_backward", size=1, seed=3)
    entries = [sums[0], sums[1], sums[1], spelled[0], spelled[0]]
    completions = [
        sums[0]["answer"],
        f"Well, <answer> 1 </answer> or rather <answer>{sums[1]['answer']}</answer>",
        "no",
        spelled[0]["answer"] + "\n",
        spelled[0]["answer"][::-1] + "?!",
    ]
    scores = reasoning_gym_score(
        completions=completions,
        prompts=completions,
        **{name: [entry[name] for entry in entries] for name in ("question", "answer", "metadata")},
    )
    assert scores[0] == scores[1] == scores[3] == 1.0
    assert scores[2] < 0.1 and scores[4] < 0.5
