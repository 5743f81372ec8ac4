"""Held-out evaluation: one completion or episode a prompt, scored by the training reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.episode import turns
from jaxrl.episodes import collect
from jaxrl.scoring import total_scores
from jaxrl.setup import Run
from jaxrl.sharing import sample_shared
from jaxrl.types import Prompt, Trajectory

__all__ = ["evaluate", "sample_rows"]


def evaluate(run: Run, *, seed: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Mean score over the held-out prompts, with the completions behind it.

    Uses the weights published last. With eval.temperature 0 the answer is greedy and the seed
    unused.
    """

    def ask(prompts: Sequence[Prompt]) -> list[Trajectory]:
        return collect(
            run.engine, prompts, run.stage, samples=1, sampling=run.eval_sampling, seed=seed
        )

    (_, trajectories, scores), _ = sample_shared(
        run.peers,
        "evaluation",
        run.eval_prompts,
        ask,
        run.score,
        collective=run.peers.count > 1 and not run.engine.concurrent,
    )
    totals = total_scores(trajectories, scores)
    lengths = [len(t.response_ids) for t in trajectories]
    metrics = {
        "eval/score": float(np.mean(totals[scores.valid])) if scores.valid.any() else np.nan,
        "eval/response_length": float(np.mean(lengths)),
        "eval/truncated_fraction": float(np.mean([t.truncated for t in trajectories])),
        "eval/prompts": float(len(trajectories)),
    }
    if run.stage:
        metrics["eval/turns"] = float(np.mean([turns(t) for t in trajectories]))
    return metrics, sample_rows(run, trajectories, totals, len(trajectories))


def sample_rows(
    run: Run, trajectories: Sequence[Trajectory], scores: np.ndarray, count: int
) -> list[dict[str, Any]]:
    """What a person reads: prompt, completion with its special tokens, score, how it ended.

    Of an episode the completion is all of it, what the environment said included.
    """
    return [
        {
            "row": t.prompt.row,
            "sample": t.sample,
            "prompt": t.prompt.text,
            "completion": run.tokenizer.decode(t.response_ids, skip_special_tokens=False),
            "score": float(score),
            "finish_reason": t.finish_reason,
            "turns": turns(t),
            "weight_version": t.weight_version,
        }
        for t, score in list(zip(trajectories, scores, strict=True))[:count]
    ]
