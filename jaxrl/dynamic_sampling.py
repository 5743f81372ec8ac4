"""Prompts whose samples all score the same, replaced by the next ones (dynamic sampling).

Such a group has no signal relative to itself: every advantage in it is 0. Source: Yu et al. 2025
(DAPO), section 3.2, there for scores of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.rollout.engine import LeftOut
from jaxrl.scoring import Scores, total_scores
from jaxrl.types import Prompt, Trajectory

__all__ = ["Sampled", "has_spread", "joined", "sample_with_spread"]


class Sampled(NamedTuple):
    """Prompts with what was sampled for them; trajectories prompt-major."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]
    scores: Scores
    """One for each trajectory."""


def has_spread(group: Sampled) -> bool:
    """Whether two valid samples differ in their total: score and all rewards beside it."""
    totals = total_scores(group.trajectories, group.scores)[group.scores.valid]
    return bool(len(totals) and totals.min() < totals.max())


def sample_with_spread(
    take: Callable[[int], list[Prompt]],
    sample: Callable[[list[Prompt]], Sampled],
    *,
    groups: int,
    rounds: int,
) -> tuple[Sampled, dict[str, float]]:
    """Sample until there are `groups` prompts with spread, each round as many as are missing.

    After `rounds` rounds what is still missing is filled with groups without spread, in the order
    they came; so there are exactly `groups`, unless the engine left prompts out.

    Args:
        take: the next so many prompts.
        sample: samples and scores them.
        groups: prompts wanted.
        rounds: most rounds, at least 1.

    Returns:
        What was chosen, in the order of the prompts, and metrics of what was not.
    """
    came: list[Sampled] = []
    spread: list[int] = []
    number = 0
    while number < rounds and len(spread) < groups:
        number += 1
        try:
            came += _groups(sample(take(groups - len(spread))))
        except LeftOut:
            if not came:
                raise
        spread = [i for i, group in enumerate(came) if has_spread(group)]
    flat = [i for i, group in enumerate(came) if group.trajectories and not has_spread(group)]
    chosen = sorted([*spread, *flat[: groups - len(spread)]])
    figures = {
        "rollout/rounds": float(number),
        "rollout/flat_groups": float(len(flat)),
        "rollout/dropped_groups": float(len(came) - len(chosen)),
        "reward/sampled_mean": _mean_total(came),
    }
    return joined([came[i] for i in chosen]), figures


def _groups(sampled: Sampled) -> list[Sampled]:
    """One `Sampled` for each prompt, in order; of a prompt that was left out it is empty."""
    members: dict[tuple[int, int], list[int]] = {(p.row, p.epoch): [] for p in sampled.prompts}
    for i, trajectory in enumerate(sampled.trajectories):
        members[trajectory.prompt.row, trajectory.prompt.epoch].append(i)
    return [
        Sampled(
            [prompt],
            [sampled.trajectories[i] for i in members[prompt.row, prompt.epoch]],
            _picked(sampled.scores, members[prompt.row, prompt.epoch]),
        )
        for prompt in sampled.prompts
    ]


def _picked(scores: Scores, places: Sequence[int]) -> Scores:
    index = np.asarray(places, np.int64)
    return Scores(
        scores.values[index],
        scores.valid[index],
        {name: values[index] for name, values in scores.per_function.items()},
        tuple(scores.tokens[i] for i in places) if scores.tokens else (),
    )


def joined(parts: Sequence[Sampled]) -> Sampled:
    """Several in one, in their order; some may be empty.

    Raises:
        LeftOut: there is not one trajectory in them.
    """
    all_scores = [part.scores for part in parts if part.trajectories]
    if not all_scores:
        raise LeftOut("none of the completions of an iteration came back")
    some_tokens = any(scores.tokens for scores in all_scores)
    tokens = [scores.tokens or (None,) * len(scores.values) for scores in all_scores]
    return Sampled(
        [prompt for part in parts for prompt in part.prompts],
        [trajectory for part in parts for trajectory in part.trajectories],
        Scores(
            np.concatenate([scores.values for scores in all_scores]),
            np.concatenate([scores.valid for scores in all_scores]),
            {
                name: np.concatenate([scores.per_function[name] for scores in all_scores])
                for name in all_scores[0].per_function
            },
            tuple(entry for part in tokens for entry in part) if some_tokens else (),
        ),
    )


def _mean_total(groups: Sequence[Sampled]) -> float:
    totals = [total_scores(g.trajectories, g.scores)[g.scores.valid] for g in groups]
    valid = np.concatenate(totals)
    return float(valid.mean()) if len(valid) else float("nan")
