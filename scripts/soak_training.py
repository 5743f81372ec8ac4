"""A small training run as a command of its own, for `soak`: started, watched, killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "Training"]

ROOT = Path(__file__).parents[1]
SETTINGS = (
    *("model.remat=none", "critic.kind=head", "rollout.prompts=8", "rollout.batch_size=32"),
    *("packing.micro_batch_tokens=288", "data.train.params={split: train, size: 40, length: 6}"),
    *("data.eval.params={split: test, size: 16, length: 6}", "eval.every=3"),
    *("checkpoint.every=1", "checkpoint.keep=2", "checkpoint.best=eval/score"),
    *("checkpoint.export=false", "log.tensorboard=false", "mesh.fsdp=-1"),
)


@dataclass(frozen=True)
class Job:
    """What is run, and where."""

    out: Path
    model: Path
    iterations: int
    processes: int

    def settings(self, run: Path) -> list[str]:
        """Arguments of `train.py`."""
        own = (f"run_dir={run}", f"model.path={self.model}", f"iterations={self.iterations}")
        return [str(ROOT / "configs/tiny.yaml"), *SETTINGS, *own]


class Training:
    """One start of the command line, as a person or a cluster would start it again."""

    def __init__(self, job: Job, run: Path) -> None:
        """Start it in the folder `run`, where it goes on from what is there."""
        run.mkdir(parents=True, exist_ok=True)
        self.run, self._begun, self._date = run, time.monotonic(), time.time()
        self._said = run / "said.txt"
        with self._said.open("w") as said:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, str(ROOT / "scripts/train.py"), *job.settings(run), *flags],
                    cwd=ROOT,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                )
                for flags in _flags_of(job.processes)
            ]
        self._seen: set[str] = set()
        self.first_save: float | None = None
        """Seconds until a save was first seen to have begun."""
        self._old_graves = set(run.glob("checkpoints/.discarded-*"))

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._begun

    @property
    def ended(self) -> bool:
        """Whether it ended by itself."""
        return all(process.poll() is not None for process in self._processes)

    @property
    def said(self) -> str:
        """What it printed."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    @property
    def went_on_from(self) -> int | None:
        """The iteration it says it went on from; None if it said nothing."""
        lines = [line for line in self.said.splitlines() if line.startswith("going on from")]
        return int(lines[0].split()[4]) if lines else None

    def saves(self) -> int:
        """How many saves have begun, as far as this has been called often enough to see them."""
        self._seen |= {path.name for path in self._unfinished()}
        if self._seen and self.first_save is None:
            self.first_save = self.seconds
        return len(self._seen)

    def saving(self) -> bool:
        """Whether one is under way."""
        return bool(self._unfinished())

    def kill(self, which: int) -> None:
        """SIGKILL for one process; the others, and whatever they had started, must end too.

        Raises:
            AssertionError: Something is still there after half a minute.
        """
        pids = [process.pid for process in self._processes]
        children = [child for pid in pids for child in _children(pid)]
        self._processes[which].send_signal(signal.SIGKILL)
        until = time.monotonic() + 30
        while not self.ended or any(map(_runs, children)):
            if time.monotonic() > until:
                left = [pid for pid in [*pids, *children] if _runs(pid)]
                raise AssertionError(f"left behind by a killed run: {left}")
            time.sleep(0.01)

    def check_went_on_from(self, step: int | None) -> None:
        """Assert that it went on from there, if it came so far as to say so or to save."""
        if self.went_on_from is not None or self.saves() or "iter " in self.said:
            assert self.went_on_from == step, (
                f"the newest whole checkpoint was {step}, it went on from {self.went_on_from}"
            )

    def caught(self) -> str:
        """What it was at when it was killed, read from what it left and no earlier kill had."""
        for path in self._unfinished():
            return f"{_stage(path)} of {int(path.name.split('-')[1])}"
        if set(self.run.glob("checkpoints/.discarded-*")) - self._old_graves:
            return "removing an old checkpoint"
        lines = [line for line in self.said.splitlines() if line.startswith("iter ")]
        if lines:
            done, total = (int(n) for n in lines[-1].split()[1].split("/"))
            return f"iteration {done + 1}" if done < total else "after the last iteration"
        return "before its first iteration was finished"

    def end(self) -> None:
        """Wait until it has ended by itself, well.

        Raises:
            RuntimeError: It failed; says how.
        """
        codes = [process.wait() for process in self._processes]
        if any(codes):
            raise RuntimeError(f"the run ended with {codes}:\n{self.said[-3000:]}")

    def _unfinished(self) -> list[Path]:
        """Saves under way; not those that an earlier kill has left there, until the next one."""
        found = []
        for path in (self.run / "checkpoints").glob(".unfinished-*"):
            try:
                begun = (path / "host.json").stat().st_mtime
            except FileNotFoundError:
                continue
            if begun >= self._date:
                found.append(path)
        return found


def _flags_of(processes: int) -> list[list[str]]:
    """Flags of each process: how several find each other."""
    if processes == 1:
        return [[]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    common = ["--coordinator", where, "--processes", str(processes)]
    return [[*common, "--process", str(index)] for index in range(processes)]


def _stage(unfinished: Path) -> str:
    if (unfinished / "manifest.json").exists():
        return "save finished, not yet named,"
    if (unfinished / "manifest.json.tmp").exists():
        return "writing the manifest"
    if (unfinished / "arrays").is_dir():
        return "summing up the files"
    return "writing the arrays"


def _children(pid: int) -> list[int]:
    """Processes that `pid` has started; none are known where there is no /proc."""
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
