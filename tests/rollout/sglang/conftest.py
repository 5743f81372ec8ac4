"""The tiny model and one server that runs it, once a session; snapshots of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl.checkpoint.hf import load_params
from jaxrl.models import ModelConfig
from jaxrl.rollout.sglang.weights import Snapshot, disk_snapshot, tensor_snapshot
from tests.rollout.sglang.models import CONFIG, make_model, make_params
from tests.rollout.sglang.publishing import BUCKET, Snap, numbers
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


@pytest.fixture
def snap(tiny_model: Path, tmp_path: Path) -> Iterator[Snap]:
    """Makes snapshots, and discards them afterwards."""
    made: list[Snapshot] = []

    def make(
        way: str,
        params: Any,
        *,
        dtype: str = "float32",
        config: ModelConfig = CONFIG,
        bucket_bytes: int = BUCKET,
    ) -> Snapshot:
        version = next(numbers)
        shared: dict[str, Any] = {"dtype": dtype, "version": version, "tag": f"test-{version}"}
        if way == "tensor":
            snapshot = tensor_snapshot(params, config, bucket_bytes=bucket_bytes, **shared)
        else:
            source = tiny_model if config == CONFIG else None
            snapshot = disk_snapshot(params, config, source=source, root=tmp_path, **shared)
        made.append(snapshot)
        return snapshot

    yield make
    for snapshot in made:
        snapshot.discard()


@pytest.fixture(scope="module")
def old() -> Any:
    """Weights to publish first."""
    return make_params(seed=10)


@pytest.fixture(scope="module")
def new() -> Any:
    """Weights to publish then."""
    return make_params(seed=11)
