"""The tiny model and one server that runs it, once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl.checkpoint.hf import load_params
from tests.rollout.sglang.models import CONFIG, make_model, make_params
from tests.rollout.sglang.servers import RunningServer, start_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny Qwen3; treat it as read-only."""
    return make_model(tmp_path_factory.mktemp("tiny-qwen3") / "model")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One real server. Leave it healthy; its weights are whatever the last test made them."""
    running = start_server(tiny_model, log=tmp_path_factory.mktemp("server") / "server.log")
    try:
        yield running.wait_healthy()
    finally:
        running.stop()


@pytest.fixture(scope="session")
def params(tiny_model: Path) -> Any:
    """The weights that servers are started with."""
    return load_params(tiny_model, CONFIG)


@pytest.fixture(scope="session")
def other_params() -> Any:
    """Weights that no server was started with."""
    return make_params(seed=1)


@pytest.fixture
def server_url(server: RunningServer) -> str:
    """Where the shared server is; nothing about it is restored."""
    return server.url
