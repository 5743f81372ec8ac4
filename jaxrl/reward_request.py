"""What every source of rewards is asked, and what a source is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.reward_values import Reward
from jaxrl.types import Prompt

__all__ = ["Asked", "RewardSource", "shown"]


@dataclass(frozen=True)
class Asked:
    """Completions that are to be scored, with their prompts; all three equally long."""

    prompts: Sequence[Prompt]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(ids) for ids in self.completion_ids]

    def basics(self) -> dict[str, list[Any]]:
        """Prompts as text, completions as text and as ids: lists, one entry a completion."""
        return {
            "prompts": [prompt.text for prompt in self.prompts],
            "completions": list(self.completions),
            "completion_ids": [[int(token) for token in ids] for ids in self.completion_ids],
        }

    def columns(self) -> dict[str, list[Any]]:
        """Every column that some prompt's row has, one entry a completion, None in the gaps."""
        names = dict.fromkeys(name for prompt in self.prompts for name in prompt.columns)
        return {name: [prompt.columns.get(name) for prompt in self.prompts] for name in names}


class RewardSource(Protocol):
    """One reward, or several that are computed in one place."""

    @property
    def parts(self) -> Sequence[tuple[str, str, float]]:
        """Of each reward: its name among the metrics, what messages call it, its weight."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be scored; costs no computation.

        Raises:
            RewardError: Naming the row.
        """
        ...

    def ask(self, asked: Asked) -> Iterator[list[Reward]]:
        """For each part in turn, one reward a completion.

        Raises:
            RewardError: A part failed, took too long, or gave something unusable.
        """
        ...

    def close(self) -> None:
        """End what was started, and whatever is under way; idempotent, from any thread."""
        ...


def shown(prompt: Prompt) -> str:
    """A prompt in an error message: its row, and the beginning of its text."""
    text = prompt.text if len(prompt.text) <= 200 else prompt.text[:200] + "..."
    return f"row {prompt.row}, prompt {text!r}"
