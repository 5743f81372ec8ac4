"""One episode: what the policy and the environment have said, and the trajectory it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl.types import FinishReason, Prompt, Trajectory

__all__ = ["Episode", "turns"]


@dataclass
class Episode:
    """One episode so far; `ids` and what is aligned to them begin behind the prompt."""

    prompt: Prompt
    sample: int
    chat: list[Mapping[str, Any]]
    """Messages so far, for the environment; a prompt of plain text counts as a user's."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: int = 0
    """Of the policy."""
    finish: FinishReason | None = None
    """Set when it is finished."""

    @classmethod
    def begun_by(cls, turn: Trajectory) -> Episode:
        """The episode whose first turn this is; that is still to be heard."""
        prompt = turn.prompt
        chat = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        return cls(prompt, turn.sample, chat)

    def hear(self, turn: Trajectory, text: str) -> None:
        """Append the policy's turn, as it was sampled."""
        count = len(turn.response_ids)
        self.ids += turn.response_ids
        self.logprobs += turn.logprobs
        self.own += [True] * count
        self.rewards += [0.0] * count
        self.versions += turn.token_versions or (turn.weight_version,) * count
        self.chat.append({"role": "assistant", "content": text})
        self.turns += 1

    def read(self, message: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Append the environment's tokens, which nobody drew."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.own += [False] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)
        self.chat.append(message)

    def next_prompt(self) -> Prompt:
        """What the next turn continues."""
        return replace(self.prompt, ids=self.prompt.ids + tuple(self.ids), first_sample=self.sample)

    def trajectory(self) -> Trajectory:
        """The finished episode."""
        assert self.finish is not None
        return Trajectory(
            prompt=self.prompt,
            sample=self.sample,
            response_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish,
            weight_version=self.versions[0],
            token_versions=tuple(self.versions) if len(set(self.versions)) > 1 else (),
            loss_mask=() if all(self.own) else tuple(self.own),
            rewards=tuple(self.rewards) if any(self.rewards) else (),
        )


def turns(trajectory: Trajectory) -> int:
    """How many turns the policy had: stretches of tokens of its own.

    >>> prompt = Prompt(row=0, ids=(1,), text="", columns={})
    >>> ids, mask = (5, 6, 7, 8), (True, False, False, True)
    >>> turns(Trajectory(prompt=prompt, sample=0, response_ids=ids, logprobs=(0.0,) * 4,
    ...                  finish_reason="stop", loss_mask=mask))
    2
    """
    own = np.array((False, *trajectory.mask))
    return int((own[1:] & ~own[:-1]).sum())
