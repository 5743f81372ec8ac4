"""A remote reward: completions out over HTTP in batches, one reward for each back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from jaxrl.config import RewardServerConfig
from jaxrl.errors import RewardError
from jaxrl.http_client import Busy, Refused, ServerClient, Unreachable
from jaxrl.loop_thread import LoopThread
from jaxrl.reward_request import Asked
from jaxrl.reward_values import Reward, UnusableReward, read_rewards
from jaxrl.types import Prompt

__all__ = ["RewardServer"]

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


class RewardServer:
    """One entry of `reward.servers`, as a `RewardSource`; several threads may ask at once.

    A request is ``{"prompts": [...], "completions": [...], "completion_ids": [[...]], "columns":
    {name: [...]}}``, every list with one entry a completion; the answer is ``{"rewards": [...]}``,
    in the same order: a number or null, or a list of these with one for each token id. A request is
    sent again, after a growing pause, while there is no answer or one that may change: 408, 425,
    429, 5xx. Proxies of the environment are not used.
    """

    def __init__(self, settings: RewardServerConfig) -> None:
        """Prepare; nothing is sent."""
        self._settings = settings
        self.parts = [(f"server:{settings.url}", f"reward server {settings.url}", settings.weight)]
        parts = urlsplit(settings.url)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._client = ServerClient(
            f"{parts.scheme}://{parts.netloc}",
            connections=settings.concurrency,
            timeout_s=settings.timeout_s,
        )
        self._free = asyncio.Semaphore(settings.concurrency)
        self._asking: set[asyncio.Task[Any]] = set()
        self._loop: LoopThread | None = LoopThread("reward-server")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """What the server needs is not known until it is asked."""

    def ask(self, asked: Asked) -> Iterator[list[Reward]]:
        """The server's rewards, one a completion.

        Raises:
            RewardError: It cannot be reached, refuses, or answers something else; with its address,
                what was expected and what came.
        """
        loop, bodies = self._loop, self._bodies(asked)
        if loop is None:
            raise RewardError(f"{self._who} was closed")
        try:
            answers = loop.run(self._all(bodies))
        except concurrent.futures.CancelledError:
            raise RewardError(f"{self._who} was closed while it was asked") from None
        size, rewards = self._settings.batch_size, []
        for number, answer in enumerate(answers):
            rewards += self._read(answer, asked.lengths[number * size : (number + 1) * size])
        yield rewards

    def close(self) -> None:
        """Cancel what is under way and end the thread; idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self._end())
            loop.close()

    @property
    def _who(self) -> str:
        return self.parts[0][1]

    def _bodies(self, asked: Asked) -> list[dict[str, Any]]:
        basics, columns, size = asked.basics(), asked.columns(), self._settings.batch_size
        for name, column in columns.items():
            try:
                json.dumps(column)
            except (TypeError, ValueError) as error:
                raise RewardError(
                    f"{self._who}: column {name} cannot be sent as JSON ({error}); "
                    "give it as text or numbers"
                ) from error

        def part(lists: dict[str, list[Any]], start: int) -> dict[str, Any]:
            return {name: entries[start : start + size] for name, entries in lists.items()}

        return [
            {**part(basics, start), "columns": part(columns, start)}
            for start in range(0, len(asked.completions), size)
        ]

    async def _all(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers, in order; the first failure ends the other requests."""
        requests = [asyncio.create_task(self._post(body)) for body in bodies]
        self._asking |= set(requests)
        try:
            return await asyncio.gather(*requests)
        finally:
            await self._cancel(requests)

    async def _cancel(self, requests: Sequence[asyncio.Task[Any]]) -> None:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        self._asking -= set(requests)

    async def _end(self) -> None:
        # Before the client: a request that finds it closed would take that for a fault.
        await self._cancel(tuple(self._asking))
        await self._client.close()

    async def _post(self, body: dict[str, Any]) -> Any:
        """One answer, decoded."""
        wait = _FIRST_WAIT_S
        for attempt in count(1):
            try:
                async with self._free:
                    return await self._attempt(body)
            except Refused as error:
                raise RewardError(f"{self._who} refuses: {error}") from error
            except (Unreachable, Busy) as error:
                if attempt >= self._settings.attempts:
                    raise RewardError(
                        f"{self._who} gave no rewards in {attempt} attempt(s): {error}; start or "
                        "repair it, or raise attempts or timeout_s of its entry in reward.servers"
                    ) from error
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)

    async def _attempt(self, body: dict[str, Any]) -> Any:
        seconds = self._settings.timeout_s
        try:
            # The client's own limit is for silence; a server may also dribble.
            async with asyncio.timeout(seconds):
                return await self._client.post(self._path, body)
        except TimeoutError as error:
            raise Unreachable(f"no whole answer within {seconds:g} s") from error

    def _read(self, answer: Any, lengths: Sequence[int]) -> list[Reward]:
        if not (isinstance(answer, dict) and isinstance(answer.get("rewards"), list)):
            text = " ".join(str(answer).split())
            raise RewardError(
                f'{self._who} must answer {{"rewards": [...]}} with one reward for each of the '
                f"{len(lengths)} completions of the request; got {text[:200]!r}"
            )
        try:
            return read_rewards(answer["rewards"], lengths)
        except UnusableReward as error:
            raise RewardError(
                f"{self._who} {error}; it must answer one number for each, or a list with one "
                "for each token"
            ) from error
