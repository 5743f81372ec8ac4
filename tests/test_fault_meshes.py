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
SIZES = {
    "data 4": (4, 1, 1),
    "fsdp 8": (1, 8, 1),
    "fsdp 4, tensor 2": (1, 4, 2),
    "data 2, fsdp 2, tensor 2": (2, 2, 2),
}
"""data, fsdp, tensor"""
CASES = ["data 4, head", *(f"{mesh}, {c}" for mesh in list(SIZES)[1:] for c in ("head", "model"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `on_meshes.py` finds."""
    out = tmp_path_factory.mktemp("meshes")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    flags += " --xla_backend_optimization_level=0"  # compiling is what takes time here
    done = subprocess.run(
        [sys.executable, str(HERE / "on_meshes.py"), str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The compiler says so where it can move an array only by copying all of it to every device.
    assert "Involuntary full rematerialization" not in done.stderr
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def on_one(case: str) -> str:
    """The same critic on one device."""
    return f"one, {case.rsplit(', ', 1)[1]}"


@pytest.mark.parametrize("case", CASES)
def test_me05_a_step_is_the_same_on_every_mesh(results: dict[str, Any], case: str) -> None:
    """Advantages, losses, norms of the gradients and all other metrics of two iterations."""
    got, want = results[case], results[on_one(case)]
    assert want["metrics"][0]["policy/grad_norm"] > 0.01
    for a, b in zip(got["advantages"], want["advantages"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"packing/efficiency"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_gradients_are_the_same_on_every_mesh(folder: Path, case: str) -> None:
    """Every array of the state after two updates; the optimizer's averages are of the gradients."""
    got, want = (np.load(folder / f"{name}.npz") for name in (case, on_one(case)))
    assert set(got.files) == set(want.files)
    for name in want.files:
        scale = max(float(np.abs(want[name]).max()), 1e-12)
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("mesh", SIZES)
def test_the_sampler_draws_the_same_on_every_mesh(results: dict[str, Any], mesh: str) -> None:
    got, want = results[f"{mesh}, head"]["sampled"], results["one, head"]["sampled"]
    assert len({tuple(t["ids"]) for t in want}) > 5
    for ours, theirs in zip(got, want, strict=True):
        assert ours["ids"] == theirs["ids"]
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_no_device_holds_a_copy_of_what_is_sharded(results: dict[str, Any], case: str) -> None:
    """Matrices are split over fsdp and tensor, in parameters and optimizer states alike."""
    _, fsdp, tensor = SIZES[case.rsplit(", ", 1)[0]]
    matrices = ("kernel", "embed")
    for name, (most, size) in results[case]["held"].items():
        # A value head has one column, and is whole everywhere.
        split = any(part in name for part in matrices) and "value_head" not in name
        assert most == size // (fsdp * tensor if split else 1), name


def test_me01_rows_that_no_mesh_divides_are_padded_without_weight(results: dict[str, Any]) -> None:
    """Six rows over four devices: eight are computed, two of them empty, and six count."""
    assert results["data 4, head"]["rows"] == 8
    cases = [results[mesh] for mesh in ("one, head", "data 4, head")]
    tokens = [case["metrics"][0]["policy/tokens"] for case in cases]
    assert tokens[0] == tokens[1] == sum(len(a) for a in cases[0]["advantages"])
