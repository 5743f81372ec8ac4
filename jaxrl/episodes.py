"""Episodes: completions of several turns, with an environment's messages between them.

A turn's prompt is the ids before it: the prompt, the responses exactly as sampled, and between them
what the chat template puts there (`continuation`). An episode is one trajectory: its response is
all that follows the prompt, its loss mask says which of that the policy wrote, and each turn's
reward stands at the turn's last token of its own.

An episode's random numbers follow from (seed, turn, prompt row, epoch, sample), whoever else plays.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl.continuation import Continuation
from jaxrl.environment import Environment, Reply, Turn
from jaxrl.episode import Episode
from jaxrl.errors import DataError, RolloutError
from jaxrl.rollout.engine import LeftOut, OnDone, RolloutEngine
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["Stage", "collect", "turn_seed"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """Where episodes are played, and by which rules."""

    environment: Environment
    continuation: Continuation
    max_turns: int
    """Most turns of the policy."""
    max_turn_tokens: int | None = None
    """Most tokens of a turn; None: what is left of the response's."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot begin an episode; see the two rooms' own checks."""
        self.environment.check(prompts)
        self.continuation.check(prompts)


def turn_seed(seed: int, turn: int) -> int:
    """Seed of turn 1, 2, ... of all episodes; the first one's is `seed`, as without environment."""
    if turn == 1:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0])


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    stage: Stage | None,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Finish `samples` episodes of each prompt, prompt-major; without a stage, completions.

    `sampling.max_new_tokens` bounds an episode's whole response, the environment's tokens included.
    An episode ends when the environment says so, and then with the reason of its last turn: "stop"
    if the policy ended that, "length" if it was cut. It ends with "length" also after
    `stage.max_turns` turns, and when the environment's message and one more token do not fit; that
    message is left away.

    Args:
        engine: plays all episodes in step, or each in a thread of its own if it is `concurrent`,
            so that none waits for another one's environment.
        prompts: where episodes begin.
        stage: environment and rules.
        samples: episodes a prompt.
        sampling: how turns are sampled.
        seed: any whole number of at least 0.
        on_done: is told of finished episodes.

    Returns:
        The trajectories; those of which a turn was left out by the engine are missing.

    Raises:
        LeftOut: none is left.
        RolloutError: engine or environment failed, or the template refuses a message; the row,
            sample and turn are named.
    """
    request: dict[str, Any] = {"samples": samples, "sampling": sampling, "seed": seed}
    if stage is None:
        return engine.generate(prompts, on_done=on_done, **request)
    table = _Table(engine, stage, sampling, seed, on_done)
    if engine.concurrent:
        found = _side_by_side(table, prompts, samples)
    else:
        found = [episode.trajectory() for episode in table.play(prompts, samples)]
    if prompts and not found:
        raise LeftOut(f"none of {len(prompts) * samples} episodes came to its end")
    return found


def _side_by_side(table: _Table, prompts: Sequence[Prompt], samples: int) -> list[Trajectory]:
    """Each episode in a thread; the first error ends the others at their next turn."""
    seats = [
        replace(prompt, first_sample=prompt.first_sample + i)
        for prompt in prompts
        for i in range(samples)
    ]
    if not seats:
        return []

    def play(prompt: Prompt) -> list[Episode]:
        try:
            return table.play([prompt], 1)
        except LeftOut as error:
            log.warning("an episode is left out: %s", error)
            return []
        except BaseException:
            table.over.set()
            raise

    threads = ThreadPoolExecutor(len(seats), "episodes")
    futures = [threads.submit(play, seat) for seat in seats]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:
        # A stop does not wait for the turns under way; whoever closes the engine ends them.
        table.over.set()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()
    failed = next((f for f in futures if f in done and f.exception()), None)
    if failed:
        failed.result()
    whole = [prompt for prompt in prompts for _ in range(samples)]
    return [
        replace(episode.trajectory(), prompt=prompt)
        for future, prompt in zip(futures, whole, strict=True)
        for episode in future.result()
    ]


class _Table:
    """Episodes of one call to `collect`: the same rules and seed for all."""

    def __init__(
        self,
        engine: RolloutEngine,
        stage: Stage,
        sampling: Sampling,
        seed: int,
        on_done: OnDone | None,
    ) -> None:
        self._engine, self._stage, self._seed, self._on_done = engine, stage, seed, on_done
        self._budget = sampling.max_new_tokens
        longest = min(stage.max_turn_tokens or self._budget, self._budget)
        self._sampling = replace(sampling, max_new_tokens=longest)
        self.over = threading.Event()
        """Nothing more is to be begun."""

    def play(self, prompts: Sequence[Prompt], samples: int) -> list[Episode]:
        """Play all episodes of `prompts` in step; those that were left out are missing."""
        first = self._turns(prompts, samples, [self._budget] * len(prompts), 1)
        live = [Episode.begun_by(turn) for turn in first]
        finished: list[Episode] = []
        heard = first
        while live:
            self._answer(live, heard)
            done = [episode for episode in live if episode.finish]
            if self._on_done and done:
                self._on_done([episode.trajectory() for episode in done])
            finished += done
            live = [episode for episode in live if not episode.finish]
            if not live or self.over.is_set():
                break
            live, heard = self._next_turns(live)
        place = {(prompt.row, prompt.epoch): i for i, prompt in enumerate(prompts)}
        return sorted(finished, key=lambda e: (place[e.prompt.row, e.prompt.epoch], e.sample))

    def _next_turns(self, live: list[Episode]) -> tuple[list[Episode], list[Trajectory]]:
        """The next turn of each episode; all have had equally many. Some may be left out."""
        prompts = [episode.next_prompt() for episode in live]
        left = [self._budget - len(episode.ids) for episode in live]
        heard = self._turns(prompts, 1, left, live[0].turns + 1)
        by_name = {(e.prompt.row, e.prompt.epoch, e.sample): e for e in live}
        return [by_name[t.prompt.row, t.prompt.epoch, t.sample] for t in heard], heard

    def _turns(
        self, prompts: Sequence[Prompt], samples: int, left: Sequence[int], number: int
    ) -> list[Trajectory]:
        longest = self._sampling.max_new_tokens
        return self._engine.generate(
            prompts,
            samples=samples,
            sampling=self._sampling,
            seed=turn_seed(self._seed, number),
            limits=[min(tokens, longest) for tokens in left],
        )

    def _answer(self, live: Sequence[Episode], heard: Sequence[Trajectory]) -> None:
        """Let the environment answer a turn of each episode, and see which are finished."""
        asked = []
        for episode, turn in zip(live, heard, strict=True):
            text = self._stage.continuation.text_of(turn.response_ids)
            episode.hear(turn, text)
            asked.append(
                Turn(episode.prompt, episode.sample, episode.turns, tuple(episode.chat), text)
            )
        replies = self._stage.environment.ask(asked)
        for episode, turn, question, reply in zip(live, heard, asked, replies, strict=True):
            episode.rewards[-1] = reply.reward
            if reply.over:
                episode.finish = turn.finish_reason
            elif episode.turns == self._stage.max_turns:
                episode.finish = "length"
            else:
                self._go_on(episode, turn, question, reply)

    def _go_on(self, episode: Episode, turn: Trajectory, question: Turn, reply: Reply) -> None:
        assert reply.message is not None
        try:
            ids = self._stage.continuation.between(
                episode.chat if episode.prompt.messages else (),
                reply.message,
                turn.response_ids[-1],
                stopped=not turn.truncated,
            )
        except DataError as error:
            raise RolloutError(f"{question.name}: {error}") from error
        if len(episode.ids) + len(ids) >= self._budget:
            episode.finish = "length"
        else:
            episode.read(reply.message, ids)
