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
    "checkpoint.keep=2",
    "log.tensorboard=false",
]


LAST = 9
"""Iterations: enough that two processes can be ended in the middle of it three times."""


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
        flags_of_xla = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
        common = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": flags_of_xla,  # compiling is what takes time here
        }
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
    """Iterations by one process with one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    results = Running(base, run_dir, 1, LAST).end()
    assert [status for status, _, _ in results] == [0], results
    return run_dir


@pytest.fixture(scope="module")
def history(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same by two processes, ended in the middle three times, and what they said each time."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    broken = run_dir.with_name("broken")
    said: dict[str, Any] = {"run": run_dir}

    first = Running(base, run_dir, 2, LAST, REWARD_FAILS=str(broken), REWARD_SLEEPS="0.5")
    first.until_saved(1)
    broken.touch()
    said["failed"] = first.end()
    said["saved after the error"] = newest(run_dir), read_metrics(run_dir)[-1]["step"]

    second = Running(base, run_dir, 2, LAST, REWARD_SLEEPS="0.5")
    second.until_saved(newest(run_dir) + 1)
    second.processes[1].send_signal(signal.SIGTERM)
    said["stopped"] = second.end()
    said["saved after the signal"] = newest(run_dir), read_metrics(run_dir)[-1]["step"]

    third = Running(base, run_dir, 2, LAST, REWARD_SLEEPS="0.5")
    third.until_saved(newest(run_dir) + 1)
    third.processes[1].send_signal(signal.SIGKILL)
    begun = time.monotonic()
    said["killed"] = third.end()
    said["seconds until all had ended"] = time.monotonic() - begun

    assert newest(run_dir) < LAST, "too late to go on"
    said["finished"] = Running(base, run_dir, 2, LAST).end()
    return said


@pytest.fixture(scope="module")
def joined(history: dict[str, Any]) -> Path:
    """Folder of the run of two processes, finished."""
    assert [status for status, _, _ in history["finished"]] == [0, 0], history["finished"]
    return history["run"]


def newest(run_dir: Path) -> int:
    """Step of the newest whole checkpoint."""
    store = CheckpointStore(run_dir / "checkpoints", keep=99)
    try:
        return store.latest() or 0
    finally:
        store.close()


def test_an_error_of_one_is_everybody_s_and_nothing_is_lost(history: dict[str, Any]) -> None:
    results = history["failed"]
    assert [status for status, _, _ in results] == [1, 1], results
    # Told by the other, or by what watches it, whoever is first.
    assert "process 1: " in results[0][2] or "process 1 failed: " in results[0][2]
    assert all("the answer key is gone" in err for _, _, err in results)
    checkpoint, line = history["saved after the error"]
    assert checkpoint == line >= 1


def test_a_signal_to_one_stops_both_with_the_last_iteration_saved(history: dict[str, Any]) -> None:
    assert [status for status, _, _ in history["stopped"]] == [3, 3], history["stopped"]
    checkpoint, line = history["saved after the signal"]
    assert checkpoint == line > history["saved after the error"][0]


def test_a_killed_process_is_missed_at_once(history: dict[str, Any]) -> None:
    results = history["killed"]
    assert [status for status, _, _ in results] == [1, -9], results
    assert "process 1 is gone without a word" in results[0][2]
    assert history["seconds until all had ended"] < 60


def test_one_of_them_speaks(history: dict[str, Any], joined: Path) -> None:
    said = [out for _, out, _ in history["finished"]]
    assert "held-out score" in said[0] and "held-out score" not in said[1]
    assert "2 process(es)" in said[0]
    assert [row["step"] for row in read_metrics(joined)] == list(range(LAST + 1))


def state_of(run_dir: Path, part: str) -> dict[str, Any]:
    """Arrays of the last checkpoint by path."""
    store = CheckpointStore(run_dir / "checkpoints", keep=99)
    restore = store.restore_policy if part == "policy" else store.restore_critic
    tree, _ = restore(LAST)
    store.close()
    return flat(tree)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, node in tree.items():
        path = f"{prefix}/{name}"
        found |= flat(node, path) if isinstance(node, dict) else {path: node}
    return found


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_two_processes_train_what_one_does(alone: Path, joined: Path, part: str) -> None:
    one, two = state_of(alone, part), state_of(joined, part)
    assert one.keys() == two.keys()
    for name, want in one.items():
        scale = float(np.abs(want).max()) + 1e-9
        np.testing.assert_allclose(two[name], want, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_their_record_is_one_record(alone: Path, joined: Path) -> None:
    """Each line once, from one process, and the metrics are those of the whole batch."""
    one, two = read_metrics(alone), read_metrics(joined)
    for want, got in zip(one, two, strict=True):
        lasting = {name for name in want if not name.startswith(WALL_CLOCK)}
        assert lasting == {name for name in got if not name.startswith(WALL_CLOCK)}
        for name in lasting:
            # The gap between sampler and trainer is rounding itself.
            if not name.startswith(("rollout/logprob_diff", "first_update")):
                np.testing.assert_allclose(
                    got[name], want[name], rtol=2e-5, atol=1e-5, err_msg=name
                )
        assert got.get("rollout/logprob_diff_max", 0) < 1e-4


def test_their_model_is_exported_and_converted(joined: Path, alone: Path, tmp_path: Path) -> None:
    """From shards on two processes: by the run at its end, and later by one process."""
    out = tmp_path / "converted"
    command = [sys.executable, "scripts/convert.py", "jaxrl-to-hf", str(joined), str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    exported, converted, want = (
        load_file(folder / "model.safetensors")
        for folder in (joined / "export", out, alone / "export")
    )
    assert exported.keys() == converted.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(exported[name], converted[name])
        np.testing.assert_allclose(exported[name], array, atol=1e-5 * float(np.abs(array).max()))
