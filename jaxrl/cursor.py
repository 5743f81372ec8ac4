"""Which prompts come next: an order for every epoch, and a place in it that can be saved."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from jaxrl.errors import CheckpointError, DataError
from jaxrl.types import Prompt

__all__ = ["PromptCursor"]


class PromptCursor:
    """Endless prompts: each row once an epoch, in an order drawn from (seed, epoch).

    A batch may cross the end of an epoch, and a prompt set smaller than a batch is gone through
    several times, so one batch can hold a row more than once.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        """Start before the first prompt of epoch 0.

        Args:
            prompts: At least one.
            seed: Together with the epoch it fixes the order.
            shuffle: False keeps the order of the rows.

        Raises:
            DataError: There are no prompts.
        """
        if not prompts:
            raise DataError("there are no prompts to take from; the data must hold at least one")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._prompts):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            upto = min(self._position + count - len(taken), len(self._prompts))
            rows = self._order[self._position : upto]
            taken += [dataclasses.replace(self._prompts[row], epoch=self._epoch) for row in rows]
            self._position = upto
        return taken

    def state(self) -> dict[str, int]:
        """Everything the next `take` depends on besides the prompts and the settings."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Go to where `state` was taken.

        Raises:
            CheckpointError: The state belongs to other prompts.
        """
        now = self.state()
        if any(int(state[name]) != now[name] for name in ("prompts", "fingerprint")):
            raise CheckpointError(
                f"the checkpoint was made with other prompts ({int(state['prompts'])} of them, now "
                f"{now['prompts']}, or other token ids); resume with the data, tokenizer and "
                "data.* settings it was made with, or start anew in another run_dir"
            )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts)).tolist()

    @cached_property
    def _fingerprint(self) -> int:
        """CRC-32 of all token ids in order."""
        crc = 0
        for prompt in self._prompts:
            crc = zlib.crc32(np.asarray((len(prompt.ids), *prompt.ids), np.int64).tobytes(), crc)
        return crc
