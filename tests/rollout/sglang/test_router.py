"""Two servers behind sglang-router: rollouts through the router, weights to the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rollout.sglang.asking import (
    GREEDY,
    LONG,
    PROMPTS,
    each_once,
    engine_of,
    honest,
    later,
    rollout,
)
from tests.rollout.sglang.faulty import FaultyProxy
from tests.rollout.sglang.servers import RunningServer, start_router, start_server


@pytest.fixture
def second(tiny_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    running = start_server(tiny_model, log=tmp_path / "second.log")
    yield running.wait_healthy()
    running.stop()


@pytest.fixture
def workers(server: RunningServer, second: RunningServer) -> Iterator[list[FaultyProxy]]:
    """The two servers, each where what it is asked is seen."""
    with FaultyProxy(server.url) as one, FaultyProxy(second.url) as other:
        yield [one, other]


@pytest.fixture
def router(workers: list[FaultyProxy], tmp_path: Path) -> Iterator[RunningServer]:
    urls = [worker.url for worker in workers]
    running = start_router(urls, None, "--policy", "round_robin", log=tmp_path / "router.log")
    running.wait_healthy()
    deadline = time.monotonic() + 60
    while httpx.get(running.url + "/workers", trust_env=False).json()["total"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield running
    running.stop()


def test_rollouts_go_through_the_router_and_weights_to_the_workers(
    workers: list[FaultyProxy],
    router: RunningServer,
    second: RunningServer,
    tiny_model: Path,
    tmp_path: Path,
    other_params: Any,
):
    urls = [worker.url for worker in workers]
    settings = rollout(*urls, router=router.url, concurrency=8, attempts=8)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(other_params, 1)
        assert [worker.count("/update_weights_from_disk") for worker in workers] == [1, 1]
        probes = [worker.count("/generate") for worker in workers]
        got = engine.generate(PROMPTS, samples=4, sampling=GREEDY, seed=0)
        each_once(got, 4)
        honest(other_params, got)
        assert {t.weight_version for t in got} == {1}
        asked = [worker.count("/generate") - p for worker, p in zip(workers, probes, strict=True)]
        assert sum(asked) == 32 and min(asked) >= 8  # both work
        engine.publish(other_params, 2)
        again = engine.generate(PROMPTS, samples=1, sampling=GREEDY, seed=0)
        assert {t.weight_version for t in again} == {2}

        killer = later(0.3, second.kill)
        got = engine.generate(PROMPTS, samples=4, sampling=LONG, seed=0)
        killer.join()
        each_once(got, 4)
        honest(other_params, got, LONG.temperature)
