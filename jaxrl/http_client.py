"""One server over HTTP: every call has a time limit, every failure one of three meanings.

`Unreachable`: nothing came back (refused, cut, silent). `Busy`: it answered that it cannot now
(408, 429, 5xx). `Refused`: it answered that it never will (other 4xx). The first two may be tried
again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from jaxrl.errors import RolloutError

__all__ = ["Busy", "Refused", "ServerClient", "ServerError", "Unreachable"]

_BUSY = (408, 425, 429)
_CONNECT_S = 10.0


class ServerError(RolloutError):
    """A call to a server failed; the message names the server, the path, and what came back."""


class Unreachable(ServerError):
    """No answer: no connection, the connection was cut, or the time ran out."""


class Busy(ServerError):
    """An answer that may be another the next time: 408, 425, 429 and 5xx."""


class Refused(ServerError):
    """An answer that will not change: any other 4xx. `body` is what the server said."""

    def __init__(self, message: str, body: Any) -> None:
        """Keep the decoded body: weight updates say in it what went wrong."""
        super().__init__(message)
        self.body = body


class ServerClient:
    """Connections to one server, for use within one event loop."""

    def __init__(self, url: str, *, connections: int, timeout_s: float) -> None:
        """Prepare; nothing is sent.

        Args:
            url: ``http://host:port``.
            connections: most at once. Whoever calls bounds its requests: one that waited here for a
                connection would not be timed.
            timeout_s: limit of a call that names none, in seconds without a byte.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            # HTTP_PROXY and the like are for the world outside, not for the servers of a run.
            trust_env=False,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Body of the answer, decoded; see `post`."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send `body` as JSON and give the decoded answer: JSON where it is, else text.

        Raises:
            Unreachable, Busy, Refused: See there.
        """
        return await self._call("POST", path, body, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Any, timeout_s: float | None) -> Any:
        seconds = self._timeout_s if timeout_s is None else timeout_s
        limit = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_S), pool=None)
        content, headers = _content(body)
        where = f"{method} {self.url}{path}"
        try:
            reply = await self._http.request(
                method, path, content=content, headers=headers, timeout=limit
            )
        except httpx.TimeoutException as error:
            raise Unreachable(f"{where}: no answer within {seconds:g} s") from error
        except httpx.TransportError as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise Unreachable(f"{where}: {reason}") from error
        decoded = _decode(reply)
        if reply.status_code in _BUSY or reply.status_code >= 500:
            raise Busy(f"{where}: {reply.status_code} {_short(decoded)}")
        if reply.status_code >= 400:
            raise Refused(f"{where}: {reply.status_code} {_short(decoded)}", decoded)
        return decoded


class _Once(httpx.AsyncByteStream):
    """A body that is let go as it is sent.

    httpx leaves requests in reference cycles, which Python may find much later; with the body in
    them, weights of many buckets would be held at a time.
    """

    def __init__(self, body: bytes) -> None:
        self._parts = [body]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._parts:
            yield self._parts.pop()


def _content(body: Any) -> tuple[_Once | None, dict[str, str]]:
    """The body as JSON, and its headers; without the length httpx would send it in chunks."""
    if body is None:
        return None, {}
    text = json.dumps(body).encode()
    return _Once(text), {"content-type": "application/json", "content-length": str(len(text))}


def _decode(reply: httpx.Response) -> Any:
    try:
        return json.loads(reply.content)
    except ValueError:
        return reply.text


def _short(body: Any) -> str:
    """What a server said, in one line: SGLang has three shapes for it."""
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body))
        body = error.get("message", error) if isinstance(error, dict) else error
    text = " ".join(str(body).split())
    return text if len(text) <= 300 else text[:297] + "..."
