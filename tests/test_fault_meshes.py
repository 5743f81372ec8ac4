"""One batch through the compiled steps on meshes of up to four (simulated) devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
MESHES = ["data 2", "fsdp 2", "tensor 2", "data 2, tensor 2", "data 4"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    flags += " --xla_backend_optimization_level=0"  # compiling is what takes time here
    done = subprocess.run(
        [sys.executable, str(HERE / "on_meshes.py"), str(tmp_path_factory.mktemp("model") / "m")],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def agree(got: dict[str, Any], want: dict[str, Any]) -> None:
    for a, b in zip(got["advantages"], want["advantages"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"packing/efficiency"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(got["moved"], want["moved"], rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_me05_a_step_is_the_same_on_every_mesh(results: dict[str, Any], mesh: str) -> None:
    """Advantages, losses, norms of the gradients and all other metrics of two iterations."""
    assert results["one"]["metrics"][0]["policy/grad_norm"] > 0.01
    agree(results[mesh], results["one"])


def test_me01_rows_that_no_mesh_divides_are_padded_without_weight(results: dict[str, Any]) -> None:
    """Six rows over four devices: eight are computed, two of them empty, and six count."""
    assert results["data 4"]["rows"] == 8
    tokens = [results[mesh]["metrics"][0]["policy/tokens"] for mesh in ("one", "data 4")]
    assert tokens[0] == tokens[1] == sum(len(a) for a in results["one"]["advantages"])
    agree(results["data 4"], results["one"])
