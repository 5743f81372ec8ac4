"""Sharing accelerators: a server's memory goes to the trainer and back.

Needs servers started with ``--enable-memory-saver``; others answer the calls and free nothing.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from jaxrl.http_client import Refused, ServerClient

__all__ = ["release", "take_back"]

_TRIES, _PAUSE_S = 40, 0.25


async def release(client: ServerClient) -> None:
    """Free weights and cache; what they held is lost.

    Raises:
        Refused: the server stays busy. Releasing the memory of a busy server kills it, so the
            server is asked for its own word first: it empties its cache only when it is idle.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            await client.post("/flush_cache")
            break
        except Refused:
            if not tries_left:
                raise
            await asyncio.sleep(_PAUSE_S)
    await client.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})


async def take_back(client: ServerClient, what: Literal["weights", "kv_cache"]) -> None:
    """Give the server its memory again: the weights, to be filled, before the cache."""
    await client.post("/resume_memory_occupation", {"tags": [what]})
