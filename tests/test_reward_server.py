"""A real HTTP server that rewards, and all the ways in which it may not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxrl import reward_server
from jaxrl.config import RewardConfig, RewardServerConfig
from jaxrl.errors import RewardError
from jaxrl.reward_request import Asked
from jaxrl.reward_server import RewardServer
from jaxrl.scoring import Scorer, Scores
from jaxrl.types import Prompt

Answer = tuple[int, Any]


class Server(ThreadingHTTPServer):
    """Answers POST with what `answer(body)` says: a status, and JSON or bytes."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.bodies.append(body)
        server.paths.append(self.path)
        status, content = server.answer(body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):  # the client may have gone
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(answer: Callable[[dict[str, Any]], Answer]) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def lengths(body: dict[str, Any]) -> Answer:
    return 200, {"rewards": [len(text) for text in body["completions"]]}


def asked(*completions: str, columns: dict[str, Any] | None = None) -> Asked:
    prompts = [
        Prompt(row=i, ids=(1,), text=f"p{i}", columns=columns or {})
        for i in range(len(completions))
    ]
    return Asked(prompts, completions, [[7] * len(text) for text in completions])


def ask(server: Server | str, *completions: str, **settings: Any) -> list[Any]:
    url = server if isinstance(server, str) else server.url
    client = RewardServer(RewardServerConfig(url=url, **settings))
    try:
        (rewards,) = client.ask(asked(*completions))
        return rewards
    finally:
        client.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_server, "_FIRST_WAIT_S", 0.02)


def test_requests_are_batches_with_everything_a_function_gets() -> None:
    columns = {"answer": 4, "other": None}
    with serving(lengths) as server:
        client = RewardServer(RewardServerConfig(url=server.url, batch_size=2))
        (rewards,) = client.ask(asked("a", "bbb", "cc", columns=columns))
        client.close()
    assert rewards == [1, 3, 2]
    assert sorted(server.bodies, key=lambda body: body["prompts"]) == [
        {
            "prompts": ["p0", "p1"],
            "completions": ["a", "bbb"],
            "completion_ids": [[7], [7, 7, 7]],
            "columns": {"answer": [4, 4], "other": [None, None]},
        },
        {
            "prompts": ["p2"],
            "completions": ["cc"],
            "completion_ids": [[7, 7]],
            "columns": {"answer": [4], "other": [None]},
        },
    ]


def test_path_and_query_are_kept() -> None:
    with serving(lengths) as server:
        assert ask(f"{server.url}/v1/score?model=a", "x") == [1]
        assert ask(server.url + "/", "x") == [1]
        assert ask(server.url, "x") == [1]
    assert server.paths == ["/v1/score?model=a", "/", "/"]


def test_order_is_kept_whoever_answers_first_and_no_more_than_allowed_are_in_flight() -> None:
    now, most, lock = [0], [0], threading.Lock()

    def slow_first(body: dict[str, Any]) -> Answer:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.3 if body["completions"][0] == "a" else 0.05)
        with lock:
            now[0] -= 1
        return lengths(body)

    texts = ["a" * (i + 1) for i in range(9)]
    with serving(slow_first) as server:
        assert ask(server, *texts, batch_size=1, concurrency=3) == list(range(1, 10))
        assert most == [3]
        most[0] = 0
        assert ask(server, *texts[:3], batch_size=1, concurrency=1) == [1, 2, 3]
        assert most == [1]


def test_waiting_for_a_turn_is_not_timed() -> None:
    def slow(body: dict[str, Any]) -> Answer:
        time.sleep(0.25)
        return lengths(body)

    with serving(slow) as server:
        given = ask(server, *"abcdef", batch_size=1, concurrency=1, attempts=1, timeout_s=0.9)
    assert given == [1] * 6


def test_several_threads_share_one_client() -> None:
    with serving(lengths) as server, ThreadPoolExecutor(4) as threads:
        client = RewardServer(RewardServerConfig(url=server.url, batch_size=1, concurrency=2))
        given = [("a" * i, "b" * (i + 1)) for i in range(1, 9)]
        answers = threads.map(lambda texts: next(client.ask(asked(*texts))), given)
        assert list(answers) == [[i, i + 1] for i in range(1, 9)]
        client.close()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_an_answer_that_may_change_is_asked_for_again(status: int) -> None:
    def third_time(body: dict[str, Any]) -> Answer:
        return lengths(body) if len(server.bodies) == 3 else (status, {"error": "loading"})

    with serving(third_time) as server:
        assert ask(server, "abc", attempts=3) == [3]
        assert len(server.bodies) == 3
    with serving(lambda body: (status, {"error": "loading the model"})) as server:
        with pytest.raises(RewardError) as caught:
            ask(server, "abc", attempts=2)
        assert len(server.bodies) == 2
    message = str(caught.value)
    assert f"{server.url} gave no rewards in 2 attempt(s)" in message
    assert f"{status} loading the model" in message


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_asked_for_once_and_quoted(status: int) -> None:
    with serving(lambda body: (status, {"error": "no such column: answr"})) as server:
        with pytest.raises(RewardError, match=rf"{server.url} refuses: .*{status} no such column"):
            ask(server, "abc")
        assert len(server.bodies) == 1


def test_one_failed_request_ends_the_others() -> None:
    def first_refused(body: dict[str, Any]) -> Answer:
        if body["completions"] == ["a"]:
            return 400, b"no"
        time.sleep(2)
        return lengths(body)

    with serving(first_refused) as server:
        began = time.monotonic()
        with pytest.raises(RewardError, match="refuses"):
            ask(server, "a", "b", batch_size=1)
        assert time.monotonic() - began < 1.5


def test_after_a_refusal_nothing_more_is_sent() -> None:
    with serving(lambda body: (400, b"no")) as server:
        client = RewardServer(RewardServerConfig(url=server.url, batch_size=1, concurrency=1))
        with pytest.raises(RewardError, match="refuses"):
            next(client.ask(asked(*"abcdef")))
        time.sleep(0.3)
        assert len(server.bodies) == 1
        client.close()


def test_waits_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_server, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(reward_server, "_LONGEST_WAIT_S", 0.15)
    times: list[float] = []

    def late(body: dict[str, Any]) -> Answer:
        times.append(time.monotonic())
        return 503, b""

    with serving(late) as server, pytest.raises(RewardError):
        ask(server, "a", attempts=5)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    for gap, least in zip(gaps, [0.1, 0.15, 0.15, 0.15], strict=True):
        assert least <= gap < least + 0.3


def test_a_silent_server_is_given_up_within_the_limit() -> None:
    def silent(body: dict[str, Any]) -> Answer:
        time.sleep(3)
        return lengths(body)

    with serving(silent) as server:
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"in 2 attempt\(s\).* within 0.3 s"):
            ask(server, "a", attempts=2, timeout_s=0.3)
        assert 0.6 < time.monotonic() - began < 2


def test_a_dribbling_server_is_given_up_within_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        thread = threading.Thread(target=dribble)
        thread.start()
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"no whole answer within 0.4 s"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", "a", attempts=1, timeout_s=0.4)
        assert time.monotonic() - began < 2
        thread.join()


def test_a_dead_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(RewardError, match=rf"reward server {url} gave no rewards in 2 attempt"):
        ask(url, "a", attempts=2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": [1.0]}, "returned 1 values for 2 completions"),
        ({"rewards": [1.0, 2.0, 3.0]}, "returned 3 values for 2 completions"),
        ({"rewards": ["1", 2.0]}, r"returned '1' \(str\) for completion 0"),
        ({"rewards": [0.0, [1.0]]}, "1 numbers for the 2 tokens of completion 1"),
        ({"rewards": 1.0}, r"one reward for each of the 2 completions .*got \"{'rewards': 1.0}\""),
        ({"scores": [1.0, 2.0]}, r"must answer {\"rewards\": \[...\]} .*got \"{'scores'"),
        ([1.0, 2.0], r"must answer .*got '\[1.0, 2.0\]'"),
        (b"<html>", "must answer .*got '<html>'"),
    ],
)
def test_any_other_answer_is_refused_with_url_expected_and_got(answer: Any, message: str) -> None:
    with (
        serving(lambda body: (200, answer)) as server,
        pytest.raises(RewardError, match=rf"{server.url} .*{message}"),
    ):
        ask(server, "a", "bb")


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(lengths) as server:
        assert ask(server, "ab", attempts=1) == [2]


def test_columns_that_are_not_json_are_named() -> None:
    with serving(lengths) as server:
        client = RewardServer(RewardServerConfig(url=server.url))
        with pytest.raises(RewardError, match="column made cannot be sent as JSON"):
            next(client.ask(asked("a", columns={"made": object()})))
        client.close()
        assert not server.bodies


def test_closing_ends_a_request_of_another_thread() -> None:
    begun = threading.Event()

    def silent(body: dict[str, Any]) -> Answer:
        begun.set()
        time.sleep(2)
        return lengths(body)

    with serving(silent) as server, ThreadPoolExecutor(1) as threads:
        client = RewardServer(RewardServerConfig(url=server.url, attempts=1))
        waiting = threads.submit(lambda: next(client.ask(asked("a"))))
        assert begun.wait(5)
        began = time.monotonic()
        client.close()
        with pytest.raises(RewardError, match="was closed while it was asked"):
            waiting.result()
        assert time.monotonic() - began < 1
        with pytest.raises(RewardError, match="was closed"):
            next(client.ask(asked("a")))
        client.close()


# As a part of the score.


def score(servers: list[RewardServerConfig], *texts: str, **keys: Any) -> Scores:
    with Scorer(RewardConfig(servers=servers, **keys)) as scorer:
        given = asked(*texts)
        return scorer.score(given.prompts, given.completions, given.completion_ids)


def test_servers_are_weighted_and_have_metrics_of_their_own() -> None:
    def tokens(body: dict[str, Any]) -> Answer:
        return 200, {"rewards": [[1.0] * len(ids) for ids in body["completion_ids"]]}

    with serving(lengths) as first, serving(tokens) as second:
        servers = [
            RewardServerConfig(url=first.url, weight=2.0),
            RewardServerConfig(url=second.url, weight=-0.5),
            RewardServerConfig(url=first.url),
        ]
        scores = score(servers, "a", "bbb")
    assert scores.values.tolist() == [3, 9]
    assert [t.tolist() for t in scores.tokens if t is not None] == [[-0.5], [-0.5] * 3]
    assert {name: values.tolist() for name, values in scores.per_function.items()} == {
        f"server:{first.url}": [1, 3],
        f"server:{second.url}": [1, 3],
        f"server:{first.url}#2": [1, 3],
    }


@pytest.mark.parametrize("content", [b'{"rewards": [1, NaN]}', b'{"rewards": [1, null]}'])
def test_null_and_nan_are_a_matter_for_on_invalid(content: bytes) -> None:
    with serving(lambda body: (200, content)) as server:
        servers = [RewardServerConfig(url=server.url)]
        with pytest.raises(
            RewardError, match=rf"reward server {server.url} returned (nan|None) for"
        ):
            score(servers, "a", "b")
        assert score(servers, "a", "b", on_invalid="drop").valid.tolist() == [True, False]


def test_probe_asks_the_servers() -> None:
    prompts = [Prompt(row=0, ids=(1,), text="p", columns={"answer": 3})] * 5
    with serving(lengths) as server:
        with Scorer(RewardConfig(servers=[RewardServerConfig(url=server.url)])) as scorer:
            scorer.probe(prompts)
        assert [body["completions"] for body in server.bodies] == [["", ""]]
        assert server.bodies[0]["columns"] == {"answer": [3, 3]}
    settings = RewardServerConfig(url=server.url, attempts=1)
    with (
        Scorer(RewardConfig(servers=[settings])) as scorer,
        pytest.raises(RewardError, match=server.url),
    ):
        scorer.probe(prompts)
