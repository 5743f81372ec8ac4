"""The clock and the lines of the terminal."""

from __future__ import annotations

import io
import re

import pytest

from jaxrl.progress import Progress, duration


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


METRICS = {
    "reward/mean": 0.64062,
    "kl/reference": 0.01234,
    "policy/approx_kl_k3": 0.0001,
    "rollout/response_length": 5.31,
}


def run_iteration(progress: Progress, clock: Clock, iteration: int, **metrics: float) -> dict:
    for name, seconds in (("rollout", 4.0), ("update", 5.0), ("rollout", 2.0)):
        with progress.phase(name):
            clock.now += seconds
    clock.now += 1.0
    return progress.finish(
        iteration,
        METRICS | metrics,
        generated_tokens=3000,
        trained_tokens=5000,
        model_flops=24e9,
    )


def test_lines_without_a_terminal() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(30, stream=stream, clock=clock) as progress:
        run_iteration(progress, clock, 1)
        run_iteration(progress, clock, 2, **{"eval/score": 0.72})
        progress.note("SIGTERM: saving iteration 2 and stopping")
    assert stream.getvalue().splitlines() == [
        "iter  1/30  reward 0.641  KL ref 0.0123  KL step 0.0001  len 5.3  "
        "12.0s (rollout 6.0 update 5.0)  500 tok/s  5m48s left",
        "iter  2/30  reward 0.641  held-out 0.720  KL ref 0.0123  KL step 0.0001  len 5.3  "
        "12.0s (rollout 6.0 update 5.0)  500 tok/s  5m36s left",
        "SIGTERM: saving iteration 2 and stopping",
    ]


def test_times_and_speeds_are_metrics() -> None:
    clock = Clock()
    progress = Progress(30, enabled=False, clock=clock)
    assert run_iteration(progress, clock, 1) == {
        "time/rollout_s": 6.0,
        "time/update_s": 5.0,
        "time/iteration_s": 12.0,
        "speed/generated_tokens_per_s": 500.0,
        "speed/trained_tokens_per_s": 1000.0,
        "speed/model_flops_per_s": 2e9,
    }
    with progress.phase("checkpoint"):  # belongs to the next iteration
        clock.now += 3.0
    assert progress.finish(2, {}) == {"time/checkpoint_s": 3.0, "time/iteration_s": 3.0}


def test_what_belongs_to_no_iteration_can_be_forgotten() -> None:
    clock = Clock()
    progress = Progress(3, enabled=False, clock=clock)
    with progress.phase("eval"):
        clock.now += 50.0
    progress.reset()
    clock.now += 2.0
    assert progress.finish(1, {}) == {"time/iteration_s": 2.0}


def test_a_phase_that_raises_is_timed_and_raises() -> None:
    clock = Clock()
    progress = Progress(3, enabled=False, clock=clock)
    with pytest.raises(ValueError, match="inside"), progress.phase("rollout"):
        clock.now += 2.0
        raise ValueError("inside")
    assert progress.finish(1, {})["time/rollout_s"] == 2.0


def test_time_left_is_not_misled_by_the_compiling_iteration() -> None:
    clock = Clock()
    progress = Progress(10, enabled=False, start=4, clock=clock)
    assert progress.seconds_left() is None
    for iteration, seconds in ((5, 60.0), (6, 10.0), (7, 11.0)):
        clock.now += seconds
        progress.finish(iteration, {})
    assert progress.seconds_left() == 3 * 11.0
    for iteration in (8, 9, 10):
        clock.now += 10.0
        progress.finish(iteration, {})
    assert progress.seconds_left() == 0.0


def test_not_enabled_shows_notes_only() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(3, enabled=False, stream=stream, clock=clock) as progress:
        run_iteration(progress, clock, 1)
        progress.note("stopping")
    assert stream.getvalue() == "stopping\n"


def test_terminal_shows_the_running_phase_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    clock, stream = Clock(), Terminal()
    with Progress(3, stream=stream, clock=clock) as progress:
        run_iteration(progress, clock, 1)
        assert progress._live is not None
        with progress.phase("update"):
            clock.now += 7.0
            progress._live.refresh()
        with progress.phase("rollout", total=9) as count:
            clock.now += 1.0
            count(2)
            count(3)
            progress._live.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown)]
    assert "iter 2/3  update 7s  24s left" in lines
    assert "iter 2/3  rollout 5/9 1s  24s left" in lines
    (finished,) = [line for line in lines if line.startswith("iter 1/3  reward")]
    assert finished.endswith("500 tok/s  24s left")  # longer than the terminal, yet one line


@pytest.mark.parametrize(
    "seconds, text",
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (3e5, "3d11h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
