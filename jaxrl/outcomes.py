"""What became of a batch of trajectories: their final scores, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxrl.config import Config
from jaxrl.rewards import ending_scores
from jaxrl.rollouts import Batch
from jaxrl.score_shaping import shape_scores
from jaxrl.scoring import total_scores
from jaxrl.types import Outcomes, Trajectory

__all__ = ["judge", "rewarded", "too_old"]


def judge(
    config: Config, iteration: int, batch: Batch, moments: jax.Array | np.ndarray
) -> tuple[Outcomes, np.ndarray, np.ndarray]:
    """What became of the trajectories that are trained on, which those are, and new moments.

    Scores are normalised, scaled, shifted and clipped, then dealt with as `truncated` says.

    Returns:
        Outcomes of the usable trajectories, in order, with zeros up to `config.trajectories`, so
        that dropped ones compile nothing new; bool [trajectories], which are usable; the moments.
    """
    algorithm, trajectories, scores = config.algorithm, batch.trajectories, batch.scores
    truncated = np.array([t.truncated for t in trajectories], bool)
    usable = scores.valid & ~too_old(config, iteration, trajectories)
    if algorithm.truncated == "mask":
        usable &= ~truncated
    shaped, new_moments = shape_scores(
        scores.values, scores.valid, config.reward, np.asarray(jax.device_get(moments))
    )
    final = ending_scores(
        shaped,
        truncated,
        np.array([len(t.response_ids) for t in trajectories], np.int32),
        mode=algorithm.truncated,
        max_length=config.rollout.max_new_tokens,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
        missing_eos_penalty=algorithm.missing_eos_penalty,
    )

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values[usable], (0, config.trajectories - int(usable.sum())))

    outcomes = Outcomes(
        scores=padded(np.asarray(final)),
        groups=padded(_groups(batch)),
        truncated=padded(truncated),
        positive=padded(total_scores(trajectories, scores) > algorithm.nll_above),
    )
    return outcomes, usable, new_moments


def rewarded(config: Config, batch: Batch) -> list[Trajectory]:
    """The trajectories, each with all its rewards beside the score, scaled like the score."""
    scale, given = config.reward.scale, batch.scores.tokens or (None,) * len(batch.trajectories)
    rewarded = []
    for trajectory, tokens in zip(batch.trajectories, given, strict=True):
        rewards = np.zeros(len(trajectory.response_ids))
        if trajectory.rewards:
            rewards += trajectory.rewards
        if tokens is not None:
            rewards += tokens
        some = tuple((scale * rewards).tolist()) if rewards.any() else ()
        rewarded.append(replace(trajectory, rewards=some))
    return rewarded


def too_old(config: Config, iteration: int, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Which samples are of weights older than `rollout.max_staleness` versions."""
    oldest = iteration - config.rollout.max_staleness
    return np.array([t.weight_version < oldest for t in trajectories], bool)


def _groups(batch: Batch) -> np.ndarray:
    """For each trajectory, the number of its prompt in the batch."""
    number = {(prompt.row, prompt.epoch): i for i, prompt in enumerate(batch.prompts)}
    return np.array([number[t.prompt.row, t.prompt.epoch] for t in batch.trajectories], np.int32)
