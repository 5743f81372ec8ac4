"""Two processes that train one model: what one process gets, killed, stopped and failed alike."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.metrics import WALL_CLOCK, read_metrics
from jaxrl.tiny import make

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "configs/tiny.yaml",
    "model.make=null",
    "model.remat=none",
    "mesh.fsdp=-1",
    "critic.kind=head",
    "rollout.prompts=4",
    "rollout.batch_size=16",
    "packing.micro_batch_tokens=576",
    "data.train.params={split: train, size: 40, length: 6}",
    "data.eval.params={split: test, size: 9, length: 6}",
    "reward.functions=[{fn: 'tests.rewarding:odd'}]",
    "eval.every=1",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "log.tensorboard=false",
]


class Running:
    """The processes of one run."""

    def __init__(self, base: Path, run_dir: Path, count: int, iterations: int, **env: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = [f"run_dir={run_dir}", f"model.path={base}", f"iterations={iterations}"]
        flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(count), "--process"]
        self.run_dir = run_dir
        # The second process is told apart by its environment where a test wants only it to fail.
        common = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "scripts/train.py", *SETTINGS, *settings]
                + ([*flags, str(index)] if count > 1 else []),
                cwd=ROOT,
                env=common | (env if index == count - 1 else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]

    def until_saved(self, step: int) -> None:
        """Wait for the checkpoint of a step."""
        until = time.monotonic() + 200
        while not (self.run_dir / "checkpoints" / f"{step:08d}").exists():
            assert time.monotonic() < until, "no checkpoint came"
            assert all(p.poll() is None for p in self.processes), self.end()
            time.sleep(0.02)

    def end(self) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each."""
        said = [process.communicate(timeout=200) for process in self.processes]
        return [(p.returncode, *text) for p, text in zip(self.processes, said, strict=True)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "base"
    make(str(folder), 0)
    return folder


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations by one process with one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    results = Running(base, run_dir, 1, 3).end()
    assert [status for status, _, _ in results] == [0], results
    return run_dir


@pytest.fixture(scope="module")
def killed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by two processes; one is killed after the first iteration, then both go on."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    first = Running(base, run_dir, 2, 3)
    first.until_saved(1)
    first.processes[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    results = first.end()
    assert [status for status, _, _ in results] == [1, -9], results
    assert "process 1 is gone without a word" in results[0][2]
    assert time.monotonic() - begun < 60
    results = Running(base, run_dir, 2, 3).end()
    assert [status for status, _, _ in results] == [0, 0], results
    assert "held-out score" in results[0][1] and "held-out score" not in results[1][1]
    return run_dir


def state_of(run_dir: Path, part: str) -> dict[str, Any]:
    """Arrays of the last checkpoint by path."""
    store = CheckpointStore(run_dir / "checkpoints", keep=9)
    restore = store.restore_policy if part == "policy" else store.restore_critic
    tree, _ = restore(3)
    store.close()
    return flat(tree)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, node in tree.items():
        path = f"{prefix}/{name}"
        found |= flat(node, path) if isinstance(node, dict) else {path: node}
    return found


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_two_processes_train_what_one_does(alone: Path, killed: Path, part: str) -> None:
    one, two = state_of(alone, part), state_of(killed, part)
    assert one.keys() == two.keys()
    for name, want in one.items():
        scale = float(np.abs(want).max()) + 1e-9
        np.testing.assert_allclose(two[name], want, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_their_record_is_one_record(alone: Path, killed: Path) -> None:
    """Each line once, from one process, and the metrics are those of the whole batch."""
    one, two = read_metrics(alone), read_metrics(killed)
    assert [row["step"] for row in two] == [0, 1, 2, 3]
    for want, got in zip(one, two, strict=True):
        assert want.keys() == got.keys()
        for name in want:
            # The gap between sampler and trainer is rounding itself.
            if not name.startswith((*WALL_CLOCK, "rollout/logprob_diff", "first_update")):
                np.testing.assert_allclose(
                    got[name], want[name], rtol=2e-5, atol=1e-5, err_msg=name
                )
        assert got.get("rollout/logprob_diff_max", 0) < 1e-4


def test_their_model_is_exported_and_converted(killed: Path, alone: Path, tmp_path: Path) -> None:
    """From shards on two processes: by the run at its end, and later by one process."""
    out = tmp_path / "converted"
    command = [sys.executable, "scripts/convert.py", "jaxrl-to-hf", str(killed), str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    exported, converted, want = (
        load_file(folder / "model.safetensors")
        for folder in (killed / "export", out, alone / "export")
    )
    assert exported.keys() == converted.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(exported[name], converted[name])
        np.testing.assert_allclose(exported[name], array, atol=1e-5 * float(np.abs(array).max()))


def test_a_signal_to_one_stops_both_with_the_last_iteration_saved(
    base: Path, tmp_path: Path
) -> None:
    running = Running(base, tmp_path / "run", 2, 200)
    running.until_saved(2)
    running.processes[1].send_signal(signal.SIGTERM)
    results = running.end()
    assert [status for status, _, _ in results] == [3, 3], results
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=9)
    assert store.latest() == steps[-1] >= 2
    store.close()


def test_an_error_of_one_is_everybody_s_and_nothing_is_lost(base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    running = Running(base, tmp_path / "run", 2, 200, REWARD_FAILS=str(broken))
    running.until_saved(1)
    broken.touch()
    results = running.end()
    assert [status for status, _, _ in results] == [1, 1], results
    assert "process 1: " in results[0][2]
    assert all("the answer key is gone" in err for _, _, err in results)
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=9)
    assert store.latest() == read_metrics(tmp_path / "run")[-1]["step"]
    store.close()
