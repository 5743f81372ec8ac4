"""The proxy that other tests rely on: passes on what it should, and fails as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.rollout.sglang.faulty import (
    Alter,
    Answer,
    CutAfter,
    CutBefore,
    CutWithin,
    Delay,
    FaultyProxy,
    Hang,
)


class Echo(BaseHTTPRequestHandler):
    """Answers with what was sent, and counts in `asked`."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        content = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    """In front of a server that echoes."""
    Echo.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with FaultyProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            yield proxy
        server.shutdown()


@pytest.fixture
def client(proxy: FaultyProxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=10.0, trust_env=False) as client:
        yield client


def test_without_orders_everything_passes(proxy: FaultyProxy, client: httpx.Client) -> None:
    for rid in ("a", "b", "a"):
        assert client.post("/generate", json={"rid": rid}).json() == {"rid": rid}
    assert client.post("/teapot", json=1).status_code == 418
    assert proxy.count("/generate") == 3 and proxy.rids() == {"a": 2, "b": 1}
    assert proxy.most_in_flight == {"/generate": 1, "/teapot": 1}


def test_orders_are_for_one_path_and_so_many_times(
    proxy: FaultyProxy, client: httpx.Client
) -> None:
    proxy.order("/generate", Answer(503, {"error": "busy"}), times=2)
    proxy.order("/generate", Alter(lambda reply: {**reply, "more": 1}))
    assert client.post("/other", json={}).status_code == 200
    for _ in range(2):
        reply = client.post("/generate", json={})
        assert reply.status_code == 503 and reply.json() == {"error": "busy"}
    assert Echo.asked == 1
    assert client.post("/generate", json={"x": 0}).json() == {"x": 0, "more": 1}
    assert client.post("/generate", json={"x": 0}).json() == {"x": 0}


@pytest.mark.parametrize(
    ("fault", "asked"), [(CutBefore(), 0), (CutAfter(), 1), (CutWithin(), 1)], ids=repr
)
def test_cuts(fault: object, asked: int, proxy: FaultyProxy, client: httpx.Client) -> None:
    proxy.order("/generate", fault)
    with pytest.raises(httpx.RemoteProtocolError) as cut:
        client.post("/generate", json={"long": "x" * 100})
    assert ("complete message body" in str(cut.value)) == isinstance(fault, CutWithin)
    assert Echo.asked == asked
    assert client.post("/generate", json={}).status_code == 200


def test_hang_and_delay(proxy: FaultyProxy, client: httpx.Client) -> None:
    proxy.order("/generate", Hang())
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json={}, timeout=0.3)
    assert Echo.asked == 0
    proxy.order("/generate", Delay(0.4))
    reply = client.post("/generate", json={})
    assert reply.status_code == 200 and reply.elapsed.total_seconds() > 0.4


def test_down_and_up_again(proxy: FaultyProxy, client: httpx.Client) -> None:
    proxy.down = True
    with pytest.raises(httpx.RemoteProtocolError):
        client.post("/generate", json={})
    proxy.down = False
    assert client.post("/generate", json={}).status_code == 200
    assert proxy.count("/generate") == 1


def test_most_in_flight_is_of_the_same_moment(proxy: FaultyProxy, client: httpx.Client) -> None:
    proxy.order("/generate", Delay(0.5), times=5)
    with ThreadPoolExecutor(5) as pool:
        done = list(pool.map(lambda _: client.post("/generate", json={}), range(5)))
    assert len(done) == 5
    client.post("/generate", json={})
    assert proxy.most_in_flight["/generate"] == 5


def test_a_client_that_leaves_is_no_longer_in_flight(proxy: FaultyProxy) -> None:
    proxy.order("/generate", Hang())
    with httpx.Client(base_url=proxy.url, trust_env=False) as client:
        for _ in range(3):
            try:
                client.post("/generate", json={}, timeout=0.3)
            except httpx.ReadTimeout:
                continue
    assert proxy.most_in_flight["/generate"] == 1
