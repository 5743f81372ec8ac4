"""Processes that tell each other things, fail together, and never wait for one that is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.errors import ConfigError, RolloutError
from jaxrl.processes import ALONE, connect, share_of

SCRIPT = Path(__file__).parent / "joined.py"


def run(scene: str, count: int = 3) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(count), str(index), scene],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    found = [process.communicate(timeout=60) for process in started]
    said = [(_without_gloo(out), err) for out, err in found]
    return [(p.returncode, *text) for p, text in zip(started, said, strict=True)]


def _without_gloo(text: str) -> str:
    """Less what JAX's connections between CPUs say of themselves."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]"))


def test_values_reach_all_in_order_from_any_thread() -> None:
    for status, out, err in run("talk"):
        assert (status, out) == (0, "parted\n"), err


def test_an_error_of_one_is_raised_on_all_and_they_can_go_on() -> None:
    results = run("refuse")
    assert [status for status, _, _ in results] == [0, 0, 0], results
    heard = [out.splitlines()[0] for _, out, _ in results]
    assert heard == ["caught process 2: no server answers"] * 2 + ["caught no server answers"]


@pytest.mark.parametrize(
    ("scene", "message", "last"),
    [
        ("die", "process 2 is gone without a word", -9),
        ("fail", "process 2 failed: RewardError: no such column", 1),
    ],
)
def test_nobody_waits_for_a_process_that_is_gone(scene: str, message: str, last: int) -> None:
    begun = time.monotonic()
    results = run(scene)
    assert [status for status, _, _ in results] == [1, 1, last]
    assert all(message in err for _, _, err in results[:2]), results
    assert time.monotonic() - begun < 45  # JAX's own heartbeat takes 100 seconds


def test_alone_everything_is_one_s_own() -> None:
    assert ALONE.exchange("x", 3) == [3]
    assert ALONE.together("x", lambda: 3) == [3]
    assert ALONE.leads
    assert share_of([1, 2], ALONE) == [1, 2]
    with pytest.raises(RolloutError, match="^as it is$"):
        ALONE.together("x", lambda: _raise(RolloutError("as it is")))


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("127.0.0.1:1", None, 0), "--processes missing; give all of"),
        (("127.0.0.1:1", 2, 2), r"--process=2 must be in \[0, 2\)"),
    ],
)
def test_flags_that_make_no_sense_are_named(given: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(*given)
