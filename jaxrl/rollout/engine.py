"""What an engine is: prompts in, trajectories out, weights replaced in between.

The checks and the seeds are here because every engine owes them: an id outside the vocabulary is
silent garbage in one engine and a crash in another, and a completion must not depend on what else
was asked for in the same call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl.errors import RolloutError
from jaxrl.types import Prompt, Sampling, Trajectory

Numbers = Sequence[int] | np.ndarray
OnDone = Callable[[Sequence[Trajectory]], None]
"""Is given completions as they are finished, each once, perhaps from another thread."""

__all__ = ["LeftOut", "OnDone", "RolloutEngine", "check_request", "request_keys"]


class LeftOut(RolloutError):
    """All completions of a request were refused for good, while servers are in order."""


class RolloutEngine(Protocol):
    """Samples completions with the weights that were published last."""

    @property
    def compilations(self) -> int:
        """Programs this process has compiled to sample; 0 where another process does the work."""
        ...

    @property
    def concurrent(self) -> bool:
        """Whether several threads may call `generate` at once, and are answered side by side."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        limits: Sequence[int] | None = None,
        on_done: OnDone | None = None,
    ) -> list[Trajectory]:
        """Finish `samples` completions of each prompt, prompt-major: all of the first prompt first.

        A prompt's samples are numbered from its `first_sample`, and what they draw follows from
        that number. `limits` has the longest response of each prompt, in tokens, where some are
        shorter than `sampling.max_new_tokens`.

        Returns:
            `len(prompts) * samples` trajectories, each with the weight version that sampled it;
            fewer where a server refused a prompt for good, which is logged.

        Raises:
            LeftOut: not one was finished, for a reason of that kind.
            RolloutError: the request cannot be met, naming the prompt's row where one is at fault.
        """
        ...

    def publish(self, policy_params: Any, version: int) -> None:
        """Sample with these weights from now on; trajectories carry `version`."""
        ...

    def rest(self) -> None:
        """Nothing will be asked until the next `publish`: what accelerators hold may go."""
        ...

    def figures(self) -> dict[str, float]:
        """Metrics of the engine's own, such as how often a request had to be sent again."""
        ...

    def close(self) -> None:
        """Let go of weights, connections and processes."""
        ...


def request_keys(
    seed: int, rows: Numbers, samples: Numbers, epochs: Numbers | None = None
) -> jax.Array:
    """One random key a completion, from (seed, prompt row, sample, epoch) and nothing else.

    Args:
        seed: any whole number; the trainer gives one an iteration.
        rows: [requests] `Prompt.row` of each completion.
        samples: [requests] which of the prompt's samples each is.
        epochs: [requests] `Prompt.epoch`: a row that a batch holds twice, because the prompt set is
            smaller, is not sampled twice alike. None: all 0.

    Returns:
        Typed keys [requests]. An engine that takes integer seeds reads `jax.random.key_data`.
    """
    # A key takes 32 bits; the upper ones are folded in so that no two seeds coincide silently.
    words = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    parts = (rows, samples, np.zeros(len(rows)) if epochs is None else epochs)
    return _fold(words, *(np.asarray(x, np.int64).astype(np.uint32) for x in parts))


@jax.jit
def _fold(words: jax.Array, *parts: jax.Array) -> jax.Array:
    root = jax.random.fold_in(jax.random.key(words[0], impl="threefry2x32"), words[1])
    return jax.vmap(lambda *part: functools.reduce(jax.random.fold_in, part, root))(*parts)


def check_request(
    prompts: Sequence[Prompt],
    *,
    samples: int,
    sampling: Sampling,
    vocab_size: int,
    limits: Sequence[int] | None = None,
) -> None:
    """Refuse a request that no engine could answer truthfully.

    Raises:
        RolloutError: an empty prompt or an id outside the vocabulary (naming the row), or a
            sampling setting outside its range.
    """
    if samples < 1:
        raise RolloutError(f"samples={samples!r} must be at least 1")
    _check_sampling(sampling)
    most = sampling.max_new_tokens
    if limits is not None and (
        len(limits) != len(prompts) or not all(1 <= limit <= most for limit in limits)
    ):
        raise RolloutError(
            f"limits={list(limits)} must be a number in [1, max_new_tokens={most}] for each of "
            f"{len(prompts)} prompts"
        )
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RolloutError(
            f"stop_token_ids={sampling.stop_token_ids}: {outside} are outside the vocabulary of"
            f" {vocab_size}; give ids in [0, {vocab_size})"
        )
    for prompt in prompts:
        if not prompt.ids:
            raise RolloutError(
                f"prompt row {prompt.row} is empty; a completion needs at least one token to follow"
            )
        low, high = min(prompt.ids), max(prompt.ids)
        if low < 0 or high >= vocab_size:
            raise RolloutError(
                f"prompt row {prompt.row} holds token id {low if low < 0 else high}, outside the"
                f" model's vocabulary of {vocab_size}; use the model's own tokenizer"
            )


def _check_sampling(sampling: Sampling) -> None:
    rules = (
        ("max_new_tokens", sampling.max_new_tokens >= 1, "at least 1"),
        (
            "temperature",
            math.isfinite(sampling.temperature) and sampling.temperature >= 0,
            "a finite number of at least 0 (0 is greedy)",
        ),
        ("top_k", sampling.top_k >= 0, "at least 0 (0 keeps all)"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1] (1 keeps all)"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1] (0 keeps all)"),
    )
    for name, holds, allowed in rules:
        if not holds:
            raise RolloutError(f"{name}={getattr(sampling, name)!r} must be {allowed}")
