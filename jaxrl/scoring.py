"""Scores of completions: the weighted sum of reward functions, reward models and reward servers.

Whatever a source answers is checked here before it can reach an advantage.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl.config import RewardConfig
from jaxrl.errors import RewardError
from jaxrl.function_rewards import FunctionRewards
from jaxrl.reward_model import RewardModel
from jaxrl.reward_request import Asked, RewardSource, shown
from jaxrl.reward_values import Reward
from jaxrl.types import Prompt, Trajectory

__all__ = ["Scorer", "Scores", "score_trajectories", "total_scores"]


@dataclass(frozen=True)
class Scores:
    """What a batch of N completions is worth."""

    values: np.ndarray
    """float32 [N], the weighted sum of the rewards of whole completions; 0 where not valid."""
    valid: np.ndarray
    """bool [N]; False where a source gave None, NaN or inf, for the completion or a token."""
    per_function: dict[str, np.ndarray]
    """float32 [N] for each function, model and server, before its weight: what it gave, its tokens
    added up; NaN where it gave no number."""
    tokens: tuple[np.ndarray | None, ...] = ()
    """float32 rewards of each completion's tokens beside `values`, None where there are none; empty
    where no source gave any."""


class Scorer:
    """Asks all sources of rewards; usable from several threads; closes itself as a context."""

    def __init__(self, reward: RewardConfig, mesh: Mesh | None = None) -> None:
        """Start the worker, import the functions there, and load the models.

        Without any source all scores are 0: rewards then come from an environment.

        Args:
            reward: The settings.
            mesh: Devices for the reward models; None: the default device.

        Raises:
            RewardError: A function cannot be imported or a model not be used; names its place in
                the settings.
        """
        self._on_invalid = reward.on_invalid
        self._lock = threading.Lock()
        self._sources: list[RewardSource] = []
        try:
            for source in _sources(reward, mesh):
                self._sources.append(source)
        except BaseException:
            self.close()
            raise
        self._names = _unique([name for source in self._sources for name, _, _ in source.parts])

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
        argument a list with one entry a completion; a column that a row lacks is None there. A
        function or server gives for each completion a number, or a list with one for each of its
        token ids; the latter are added up in `Scores.tokens`, apart from the former.

        Args:
            prompts: The prompt of each completion.
            completions: Text.
            completion_ids: Token ids of each completion.

        Raises:
            RewardError: A source failed, took too long, or did not give one reward a completion.
        """
        if not len(prompts) == len(completion_ids) == len(completions):
            raise ValueError(
                f"prompts ({len(prompts)}), completions ({len(completions)}) and completion_ids "
                f"({len(completion_ids)}) must be equally many"
            )
        with self._lock:
            return self._score(Asked(prompts, completions, completion_ids), self._on_invalid)

    def probe(self, prompts: Sequence[Prompt]) -> None:
        """Ask every source once, with empty completions for the first `prompts`.

        A function that raises or needs a column the data lacks, a prompt that a model cannot read,
        a server that is down: found before the first rollout. None, NaN and inf are not complaints
        here.
        """
        few = list(prompts[:2])
        with self._lock:
            for source in self._sources:
                source.check(prompts)
            self._score(Asked(few, [""] * len(few), [[]] * len(few)), "drop")

    def close(self) -> None:
        """End the worker, the connections to servers, and what is under way there.

        Does not wait for another thread's `score`, which then fails.
        """
        for source in self._sources:
            source.close()

    def _score(self, asked: Asked, on_invalid: str) -> Scores:
        count = len(asked.completions)
        total = np.zeros(count, np.float64)
        tokens: list[np.ndarray | None] = [None] * count
        per_function = {name: np.zeros(count, np.float32) for name in self._names}
        if not count:
            return Scores(total.astype(np.float32), np.zeros(0, bool), per_function)
        for name, (who, weight, rewards) in zip(self._names, self._rewards(asked), strict=True):
            given = _finite(rewards, who, asked.prompts, on_invalid)
            per_function[name] = np.array([np.sum(reward) for reward in given], np.float32)
            for i, reward in enumerate(given):
                if reward.ndim:
                    before = tokens[i]
                    tokens[i] = weight * reward + (0.0 if before is None else before)
                else:
                    total[i] += weight * reward
        who, prompts = "the weighted sum of the rewards", asked.prompts
        values = np.array(_finite(total.tolist(), who, prompts, on_invalid), np.float32)
        listed = [0.0 if given is None else given.tolist() for given in tokens]
        summed = _finite(listed, f"{who} of tokens", prompts, on_invalid)
        valid = np.isfinite(values) & np.array([np.isfinite(given).all() for given in summed])
        kept = tuple(
            given.astype(np.float32) if given.ndim and use else None
            for given, use in zip(summed, valid, strict=True)
        )
        some = any(given is not None for given in kept)
        values = np.where(valid, values, np.float32(0))
        return Scores(values, valid, per_function, kept if some else ())

    def _rewards(self, asked: Asked) -> Iterator[tuple[str, float, list[Reward]]]:
        """Of every part of every source: what messages call it, its weight, what it gives."""
        for source in self._sources:
            for (_, who, weight), rewards in zip(source.parts, source.ask(asked), strict=True):
                yield who, weight, rewards


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


def _sources(reward: RewardConfig, mesh: Mesh | None) -> Iterator[RewardSource]:
    if reward.functions:
        yield FunctionRewards(reward.functions, reward.timeout_s)
    for i, settings in enumerate(reward.models):
        yield RewardModel(settings, key=f"reward.models[{i}]", mesh=mesh)
    if reward.servers:
        # An HTTP client is loaded by the runs that talk to servers.
        from jaxrl.reward_server import RewardServer

        yield from map(RewardServer, reward.servers)


def _unique(names: Sequence[str]) -> list[str]:
    """The names, those that came before numbered.

    >>> _unique(["a", "b", "a"])
    ['a', 'b', 'a#2']
    """
    counts = [names[:i].count(name) + 1 for i, name in enumerate(names)]
    return [n if count == 1 else f"{n}#{count}" for n, count in zip(names, counts, strict=True)]


def _finite(
    rewards: Sequence[Reward], who: str, prompts: Sequence[Prompt], on_invalid: str
) -> list[np.ndarray]:
    """Each reward as float64, without axes or [tokens]; one NaN where some number is not finite.

    Raises:
        RewardError: A number is None, or not finite in float32, and `on_invalid` is "error".
    """
    arrays = [
        np.array([math.nan if v is None else v for v in reward], np.float64)
        if isinstance(reward, list)
        else np.array(math.nan if reward is None else reward, np.float64)
        for reward in rewards
    ]
    most = np.finfo(np.float32).max
    bad = [i for i, array in enumerate(arrays) if not (np.abs(array) <= most).all()]
    if bad and on_invalid == "error":
        first, reward, where = bad[0], rewards[bad[0]], ""
        if isinstance(reward, list):
            at = int(np.flatnonzero(~(np.abs(arrays[first]) <= most))[0])
            reward, where = reward[at], f"token {at} of "
        raise RewardError(
            f"{who} returned {reward} for {where}completion {first}, {shown(prompts[first])} "
            f"({len(bad)} of {len(rewards)} completions); return a finite number, or set "
            "reward.on_invalid=drop to leave such completions out"
        )
    for i in bad:
        arrays[i] = np.array(math.nan)
    return arrays
