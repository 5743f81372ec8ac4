"""Rollouts that the processes of a run share: each its part of the prompts, and all get everything.

Which tokens a request draws follows from its seed, row and sample, so the batch is the one that a
single process would have got.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.dynamic_sampling import Sampled, joined
from jaxrl.processes import Peers, share_of
from jaxrl.rollout.engine import LeftOut
from jaxrl.scoring import Scores
from jaxrl.types import Prompt, Trajectory

__all__ = ["sample_shared"]


def sample_shared(
    peers: Peers,
    name: str,
    prompts: Sequence[Prompt],
    ask: Callable[[Sequence[Prompt]], list[Trajectory]],
    score: Callable[[Sequence[Trajectory]], Scores],
    *,
    collective: bool,
) -> tuple[Sampled, float]:
    """Trajectories and scores of the prompts, the same on every process, and seconds of scoring.

    Args:
        peers: The processes.
        name: Of this batch; differs from those of other threads.
        prompts: The same on every process.
        ask: Has prompts answered.
        score: Scores trajectories.
        collective: Every process must ask for all prompts, since a compiled program over all their
            devices answers; only the scoring is shared then.

    Raises:
        LeftOut: Nothing came back, on any process.
    """
    everything = ask(prompts) if collective else []

    def work() -> tuple[Sampled, float]:
        mine = share_of(list(prompts), peers)
        try:
            if collective:
                trajectories = share_of_samples(everything, len(prompts), peers)
            else:
                trajectories = ask(mine) if mine else []
        except LeftOut:
            trajectories = []
        begun = time.perf_counter()
        scores = score(trajectories) if trajectories else NO_SCORES
        return Sampled(list(mine), trajectories, scores), time.perf_counter() - begun

    parts = peers.together(name, work)
    return joined([sampled for sampled, _ in parts]), max(seconds for _, seconds in parts)


def share_of_samples(
    trajectories: Sequence[Trajectory], prompts: int, peers: Peers
) -> list[Trajectory]:
    """The trajectories of this process's share of the prompts; every prompt has equally many."""
    samples = len(trajectories) // max(prompts, 1)
    return [trajectories[i] for i in share_of(range(prompts), peers) for i in _samples(i, samples)]


def _samples(prompt: int, samples: int) -> range:
    return range(prompt * samples, (prompt + 1) * samples)


NO_SCORES = Scores(np.zeros(0, np.float32), np.zeros(0, bool), {})
