"""A proxy in front of a real server that misbehaves on order, and remembers what it was asked.

with FaultyProxy(server_url) as proxy:
    proxy.order("/generate", Answer(503, "busy"), times=2)
    ...                                  # talk to proxy.url
    assert proxy.count("/generate") == 3
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Hang:
    """Say nothing until the client gives up; the server is not asked."""


@dataclass(frozen=True)
class Answer:
    """Answer without asking the server; a body that is no string is sent as JSON."""

    status: int
    body: Any = ""


@dataclass(frozen=True)
class CutBefore:
    """Cut the connection; the server is not asked."""


@dataclass(frozen=True)
class CutAfter:
    """Let the server answer, and cut the connection instead of handing that on."""


@dataclass(frozen=True)
class CutWithin:
    """Let the server answer, and cut the connection in the middle of that."""


@dataclass(frozen=True)
class Alter:
    """Hand on what the function makes of the server's decoded answer."""

    change: Callable[[Any], Any]


@dataclass(frozen=True)
class Delay:
    """Ask the server this many seconds later."""

    seconds: float


Fault = Hang | Answer | CutBefore | CutAfter | CutWithin | Alter | Delay


class _Cut(Exception):
    """The connection is to be cut after these bytes."""

    def __init__(self, sent: bytes = b"") -> None:
        self.sent = sent


@dataclass
class _Asked:
    method: str
    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Any:
        return json.loads(self.content) if self.content else None


class FaultyProxy:
    """Listens on `url` in a thread of its own until it is closed."""

    def __init__(self, server_url: str) -> None:
        self.down = False
        """While true, every connection is cut, as if the server had ended."""
        self.most_in_flight: Counter[str] = Counter()
        """By path: how many requests were unanswered at once, at most."""
        self._orders: dict[str, deque[Fault]] = defaultdict(deque)
        self._asked: list[_Asked] = []
        self._in_flight: Counter[str] = Counter()
        self._server_url = server_url
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.daemon = True
        self._thread.start()
        assert self._ready.wait(30.0), "the proxy does not start"

    def order(self, path: str, fault: Fault, times: int = 1) -> None:
        """The next `times` requests to `path` that have no order yet get this one."""
        self._orders[path].extend([fault] * times)

    def cancel_orders(self) -> None:
        """What was ordered and not needed is forgotten."""
        self._orders.clear()

    def count(self, path: str) -> int:
        """Requests to a path, those with faults included; not those while `down`."""
        return sum(asked.path == path for asked in self._asked)

    def bodies(self, path: str) -> list[Any]:
        """What those requests said, in order."""
        return [asked.body for asked in self._asked if asked.path == path]

    def rids(self, path: str = "/generate") -> Counter[str]:
        """How often each request id was seen."""
        return Counter(body["rid"] for body in self.bodies(path) if body and "rid" in body)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30.0)
        self._loop.close()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _run(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._talk(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass  # the client has gone, or the proxy is closed
            finally:
                writer.close()
                connections.discard(task)

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=self._server_url, timeout=None, trust_env=False, limits=limits
        )
        listener = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = "http://127.0.0.1:{1}".format(*listener.sockets[0].getsockname())
        self._ready.set()
        await self._stop.wait()
        listener.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections)
        await self._http.aclose()
        await asyncio.sleep(0)  # closed connections are torn down in the next turn

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, one after another."""
        while (asked := await _read_request(reader)) and not self.down:
            self._asked.append(asked)
            path = asked.path
            self._in_flight[path] += 1
            self.most_in_flight[path] = max(self.most_in_flight[path], self._in_flight[path])
            reply = asyncio.create_task(self._reply(asked))
            left = asyncio.create_task(reader.read(1))
            try:
                await asyncio.wait([reply, left], return_when=asyncio.FIRST_COMPLETED)
                gone = left.done()
            finally:
                self._in_flight[path] -= 1
                if not reply.done():
                    reply.cancel()  # the server sees its connection closed as well
                left.cancel()  # before there is an answer, so that it takes no byte of what follows
                await asyncio.gather(reply, left, return_exceptions=True)
            if gone:
                return
            try:
                writer.write(reply.result())
            except _Cut as cut:
                writer.write(cut.sent)
                return
            finally:
                await writer.drain()

    async def _reply(self, asked: _Asked) -> bytes:
        orders = self._orders[asked.path]
        fault = orders.popleft() if orders else None
        match fault:
            case Hang():
                await asyncio.Event().wait()
            case Answer(status, body):
                content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                return _message(status, content)
            case CutBefore():
                raise _Cut
            case Delay(seconds):
                await asyncio.sleep(seconds)
        try:
            reply = await self._http.request(
                asked.method, asked.path, content=asked.content, headers=asked.headers
            )
        except httpx.TransportError:
            raise _Cut from None  # the server itself has gone
        content = reply.content
        if isinstance(fault, CutAfter):
            raise _Cut
        if isinstance(fault, Alter):
            content = json.dumps(fault.change(json.loads(content))).encode()
        message = _message(reply.status_code, content)
        if isinstance(fault, CutWithin):
            raise _Cut(message[: len(message) - len(content) // 2 - 1])
        return message


async def _read_request(reader: asyncio.StreamReader) -> _Asked | None:
    """The next request of a connection; None where the client has closed it."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    fields = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    content = await reader.readexactly(int(fields.get("content-length", 0)))
    kept = {name: fields[name] for name in ("content-type",) if name in fields}
    return _Asked(method, path, content, kept)


def _message(status: int, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status} said-the-proxy\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content
