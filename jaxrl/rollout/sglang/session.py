"""One server taking weights: what it is asked, and what its answers mean.

New weights make the cache useless, and a server empties it only while no request holds an entry.
Where one did, it answers that the weights are in but the cache was not flushed, and keeps the old
version's name. That is half a success: `_settle` does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import RolloutError
from jaxrl.http_client import Refused, ServerClient

__all__ = ["TensorSession", "load_from_disk"]

_NOT_FLUSHED = "cache was not flushed"
_FLUSH_S = 30.0
_LAST_WORD_S = 10.0
"""Seconds that a server which has failed gets to end its session."""


async def load_from_disk(server: ServerClient, folder: str, tag: str) -> None:
    """Make `server` load a model folder that it can read, as version `tag`.

    Raises:
        RolloutError: it does not, or its cache stays in use.
    """
    body = {"model_path": folder, **_new_version(tag)}
    if not await _load(server, "/update_weights_from_disk", body):
        await _settle(server, tag)


class TensorSession:
    """An update of one server by tensors: `open`, `load` for each bucket, `close`."""

    def __init__(self, server: ServerClient, tag: str) -> None:
        """Nothing is sent; `tag` is the version when all is done."""
        self.loaded = False
        """Whether the last bucket has arrived."""
        self._server, self._tag = server, tag
        self._open = False
        self._settled = True
        self._ranks = 1

    async def open(self) -> None:
        """Begin; a session that somebody left open is ended first."""
        info = await self._server.get("/server_info")
        # Each process of a tensor-parallel server unpickles an entry of its own, the whole weights.
        self._ranks = info.get("tp_size") or 1 if isinstance(info, dict) else 1
        try:
            await _succeed(self._server, "/begin_weight_update")
        except Refused as error:
            if "/begin_weight_update: 404 " in str(error):
                return  # from before there were sessions
            if "already open" not in str(error):
                raise
            await _succeed(self._server, "/end_weight_update")
            await _succeed(self._server, "/begin_weight_update")
        self._open = True

    async def load(self, bucket: str, last: bool) -> None:
        """Send a bucket; only the last one makes the version, so that no half of it has its name.

        Raises:
            RolloutError: the server does not take it.
        """
        body = {
            "serialized_named_tensors": [bucket] * self._ranks,
            "load_format": "flattened_bucket",
            **(_new_version(self._tag) if last else {"flush_cache": False}),
            "abort_all_requests": False,
        }
        self._settled = await _load(self._server, "/update_weights_from_tensor", body)
        self.loaded = last

    async def close(self) -> None:
        """End the session, also one that failed.

        Raises:
            RolloutError: the server does not, or its cache stays in use.
        """
        if self._open:
            self._open = False
            # Of a server that has failed nothing is expected any more, least of all quickly.
            seconds = None if self.loaded else _LAST_WORD_S
            await _succeed(self._server, "/end_weight_update", timeout_s=seconds)
        if self.loaded and not self._settled:
            await _settle(self._server, self._tag)


def _new_version(tag: str) -> dict[str, Any]:
    return {"weight_version": tag, "flush_cache": True, "abort_all_requests": False}


async def _load(server: ServerClient, path: str, body: Mapping[str, Any]) -> bool:
    """Whether all is done; False means that the weights are in, and the cache still to be flushed.

    Raises:
        RolloutError: the weights are not in.
    """
    try:
        await _succeed(server, path, body)
    except RolloutError as error:
        if _NOT_FLUSHED not in str(error):
            raise
        return False
    return True


async def _settle(server: ServerClient, tag: str) -> None:
    """Flush the cache, and give the version that the server kept back meanwhile."""
    loop = asyncio.get_running_loop()
    deadline, wait = loop.time() + _FLUSH_S, 0.05
    while True:
        try:
            await server.post("/flush_cache")
            break
        except Refused as error:
            if loop.time() > deadline:
                raise RolloutError(
                    f"{server.url} has the weights {tag}, but its cache of older ones was in use "
                    f"for {_FLUSH_S:g} s: {error}"
                ) from error
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)
    body = {"new_version": tag, "abort_all_requests": False}
    await _succeed(server, "/update_weight_version", body)


async def _succeed(
    server: ServerClient,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """POST; anything but ``success: true`` is a failure, whatever the status."""
    reply = await server.post(path, dict(body or {}), timeout_s=timeout_s)
    if not (isinstance(reply, dict) and reply.get("success") is True):
        said = reply.get("message", reply) if isinstance(reply, dict) else reply
        raise RolloutError(f"POST {server.url}{path}: no success, but {said!r}")
