"""Several calls at once: all of them, or what went wrong with each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from jaxrl.errors import RolloutError
from jaxrl.http_client import ServerClient

__all__ = ["all_of", "failures"]

T = TypeVar("T")


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results, in order; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def failures(
    clients: Iterable[ServerClient], call: Callable[[ServerClient], Awaitable[Any]]
) -> dict[str, Exception]:
    """Call each of `clients`; url -> error for those where it failed."""
    clients = list(clients)

    async def one(client: ServerClient) -> Exception | None:
        try:
            await call(client)
        except RolloutError as error:
            return error
        return None

    errors = await asyncio.gather(*map(one, clients))
    return {c.url: error for c, error in zip(clients, errors, strict=True) if error}
