"""Kills training runs at random moments and compares how they end with one never stopped.

    scripts/soak.sh --kills 50 --seed 0 --out runs/soak
    scripts/soak.sh --kills 10 --processes 4

A run of the tiny model saves every iteration. It is started, killed and started again until it is
finished; then it is compared, and the next one begins, until there were as many kills as asked for.
Moments are drawn with a seed, in three ways: over the whole life of the process, from its first
iteration on, or inside a save (as soon as the folder of one appears, and a little later). Of
several processes that train together one is killed, and the others must end by themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from soak_training import Job, Training

from jaxrl.checkpoint.reading import SavedStates
from jaxrl.metrics import WALL_CLOCK, read_metrics, read_samples
from jaxrl.provenance import provenance

ROOT = Path(__file__).parents[1]
AIMS = ("a save", "a save", "training", "any moment")
HEADER = (
    "| kill | run | aimed at | after | went on from | caught | newest whole one then |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Pace:
    """How long things take, in seconds; moments are drawn from it."""

    start: float
    """From the start of the process to its first save: as it was the last time."""
    training: float
    """From there to the end of a run that nobody stops."""
    save: float
    """Longest time that a checkpoint's folder was there before it had its final name."""


def measure(job: Job, run: Path) -> Pace:
    """Run to the end undisturbed."""
    training = Training(job, run)
    save, since = 0.0, None
    while not training.ended:
        training.saves()
        if training.saving():
            since = since or time.monotonic()
            save = max(save, time.monotonic() - since)
        else:
            since = None
        time.sleep(0.002)
    whole = training.seconds
    training.end()
    start = training.first_save or whole
    return Pace(start, whole - start, save)


def wait_for(training: Training, aim: str, pace: Pace, rng: random.Random) -> bool:
    """Wait for the moment to kill; False if the run ended before."""
    draws = [rng.random() for _ in range(3)]  # as many whatever the aim
    if aim == "any moment":
        saves, delay = 0, draws[0] * (pace.start + pace.training)
    elif aim == "training":
        saves, delay = 1, draws[0] * pace.training / 2
    else:
        saves, delay = 1 + int(draws[1] * 3), draws[0] * pace.save
    while training.saves() < saves and not training.ended:
        time.sleep(0.001)
    until = time.monotonic() + delay
    while time.monotonic() < until and not training.ended:
        time.sleep(0.001)
    return not training.ended


def differences(one: Path, other: Path) -> list[str]:
    """What the ends of two runs differ in: checkpoints, every array's bits, records; [] if none."""
    found = []
    states = [SavedStates(run / "checkpoints") for run in (one, other)]
    if states[0].steps() != states[1].steps() or states[0].best() != states[1].best():
        found.append(f"checkpoints: {[(s.steps(), s.best()) for s in states]}")
    (arrays, host), (others, other_host) = (s.restore_named(s.find("latest")) for s in states)
    for name in sorted(arrays.keys() | others.keys()):
        a, b = (np.asarray(tree.get(name, ())) for tree in (arrays, others))
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            found.append(name)
    if host["cursor"] != other_host["cursor"]:
        found.append("cursor")
    for name, records in (
        ("metrics.jsonl", [_lasting(run) for run in (one, other)]),
        ("samples.jsonl", [read_samples(run) for run in (one, other)]),
    ):
        if records[0] != records[1]:
            found.append(name)
    for state in states:
        state.close()
    return found


def _lasting(run: Path) -> list[dict[str, object]]:
    rows = read_metrics(run)
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


def newest(run: Path) -> int | None:
    """The newest checkpoint whose every byte is what was written.

    Raises:
        AssertionError: A kill has left a damaged one under a final name.
    """
    states = SavedStates(run / "checkpoints")
    step = states.latest(contents=True)
    assert not states.damaged(), f"a kill left damage behind: {states.damaged()}"
    states.close()
    return step


def soak(job: Job, *, kills: int, seed: int) -> Iterator[str]:
    """Kill and compare; yields the lines of the log.

    Raises:
        AssertionError: A run went on from elsewhere, left something behind, or ended otherwise.
        RuntimeError: A start failed.
    """
    rng, whole = random.Random(seed), job.out / "uninterrupted"
    pace = measure(job, whole)
    yield (
        f"Uninterrupted: {job.iterations} iterations; the first save after {pace.start:.1f} s, the "
        f"end {pace.training:.1f} s later; the longest save took {pace.save:.2f} s.\n\n{HEADER}"
    )
    killed, number, verdicts = 0, 0, []
    while killed < kills:
        number, before = number + 1, killed
        run, there = job.out / f"run-{number}", None
        while True:
            training = Training(job, run)
            caught = killed < kills and wait_for(training, aim := rng.choice(AIMS), pace, rng)
            if not caught:
                training.end()
                training.check_went_on_from(there)
                break
            after = training.seconds
            training.kill(rng.randrange(job.processes))
            training.check_went_on_from(there)
            pace = replace(pace, start=training.first_save or pace.start)
            killed, there = killed + 1, newest(run)
            yield (
                f"| {killed}/{kills} | {number} | {aim} | {after:.1f} s | "
                f"{_or_dash(training.went_on_from)} | {training.caught()} | {_or_dash(there)} |"
            )
        found = differences(whole, run)
        assert not found, f"run {number} differs from the uninterrupted one in {found}"
        verdicts.append(f"Run {number}: {killed - before} kills, then finished; equal to the bit.")
        shutil.rmtree(run)
    yield "\n" + "\n".join(verdicts)


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 only if every run ended as the one that was never stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=12, help="of each run")
    parser.add_argument("--processes", type=int, default=1, help="that train together")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/soak", help="a folder of its own")
    parser.add_argument("--model", type=Path, help="the tiny model, if it is there (makes it)")
    flags = parser.parse_args(argv)
    out = flags.out.absolute()
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    job = Job(out, (flags.model or out / "model").absolute(), flags.iterations, flags.processes)
    # Programs are compiled once: most of what a start costs is Python's.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(out / "cache")
        measure(job, out / "warm-up")
    found: dict[str, Any] = provenance()
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("python", "jax"))
    together = f" --processes {flags.processes}" if flags.processes > 1 else ""
    asked = f"--kills {flags.kills} --seed {flags.seed}{together}"
    lines = [f"`scripts/soak.sh {asked}` with {versions}\n"]
    try:
        for line in soak(job, kills=flags.kills, seed=flags.seed):
            print(line, flush=True)
            lines.append(line)
        verdict, code = f"All {flags.kills} kills: every run ended as the one never stopped.", 0
    except (AssertionError, RuntimeError) as error:
        verdict, code = f"FAILED: {error}", 1
    print(f"\n{verdict}", flush=True)
    (out / "soak.md").write_text("\n".join([*lines, "", verdict, ""]), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
