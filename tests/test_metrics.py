"""The record of a run: every step, valid JSON, the same after a resume, whatever trackers do."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import trackers
from jaxrl.metrics import MetricsLog, average, average_rows, read_metrics, read_samples
from jaxrl.trackers import GuardedTracker


def test_average_leaves_out_what_is_not_finite_and_counts_it() -> None:
    assert average([1, math.nan, 3]) == (2.0, 1)
    assert average([1, math.inf, -math.inf]) == (1.0, 2)
    mean, invalid = average([math.nan])
    assert math.isnan(mean) and invalid == 1
    assert average([0.0, 0.0]) == (0.0, 0)


def test_average_rows_keeps_no_key_without_a_valid_value() -> None:
    rows = [{"a": 1.0, "b": math.nan}, {"a": math.nan, "b": math.nan}, {"a": 3.0, "c": 5.0}]
    assert average_rows(rows) == {"a": 2.0, "a_invalid": 1.0, "b_invalid": 2.0, "c": 5.0}
    assert average_rows([]) == {}


def test_each_step_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    log.write(0, {"reward/mean": jnp.float32(0.5), "updates/skipped": np.int32(2)})
    assert read_metrics(tmp_path / "run") == [
        {"step": 0, "reward/mean": 0.5, "updates/skipped": 2.0}
    ]
    log.write(1, {"reward/mean": 0.1})
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1]
    log.close()


def test_invalid_values_are_valid_json_and_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(3, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {
        "step": 3,
        "a": None,
        "b": None,
        "c": None,
        "d": 1.0,
        "invalid": {"a": "nan", "b": "inf", "c": "-inf"},
    }
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 1.0)
    assert "invalid" not in row


def test_floats_come_back_to_the_bit(tmp_path: Path) -> None:
    value = float(np.float32(1) / np.float32(3))
    log = MetricsLog(tmp_path)
    log.write(0, {"a": value, "b": 0.1 + 0.2})
    assert read_metrics(tmp_path) == [{"step": 0, "a": value, "b": 0.1 + 0.2}]


def test_samples_hold_any_text(tmp_path: Path) -> None:
    text = 'a\nb\u2028c "quoted" \x85 é 漢 \udc80'
    log = MetricsLog(tmp_path)
    log.samples(2, [{"prompt": text, "reward": np.float32(0.5), "parts": {"x": math.nan}}] * 2)
    rows = read_samples(tmp_path)
    assert rows == [{"step": 2, "prompt": text, "reward": 0.5, "parts": {"x": "nan"}}] * 2
    assert "é 漢" in (tmp_path / "samples.jsonl").read_text(encoding="utf-8")


def write_steps(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.write(step, {"reward/mean": step / 10})
        log.samples(step, [{"completion": str(step)}])
    log.close()


def test_resumed_record_equals_that_of_a_run_never_stopped(tmp_path: Path) -> None:
    write_steps(MetricsLog(tmp_path / "whole"), 0, 1, 2, 3, 4)
    write_steps(MetricsLog(tmp_path / "parts"), 0, 1, 2, 3)
    write_steps(MetricsLog(tmp_path / "parts", resume_step=2), 3, 4)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_half_written_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    write_steps(MetricsLog(tmp_path), 0, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2, "name": "é'.encode()[:-1])
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1]
    write_steps(MetricsLog(tmp_path, resume_step=1), 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]
    assert [row["completion"] for row in read_samples(tmp_path)] == ["0", "1", "2"]


def test_a_run_that_starts_anew_starts_an_empty_record(tmp_path: Path) -> None:
    write_steps(MetricsLog(tmp_path), 0, 1)
    write_steps(MetricsLog(tmp_path), 0)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]
    assert read_metrics(tmp_path / "nowhere") == []


def test_tensorboard_files_hold_every_scalar(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    log = MetricsLog(tmp_path, tensorboard=True)
    for step in range(3):
        log.write(step, {"reward/mean": step / 2, "value/loss": math.nan})
    log.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    scalars = []
    content = path.read_bytes()
    while content:
        length = int.from_bytes(content[:8], "little")  # TFRecord: length, its CRC, data, its CRC
        event = Event.FromString(content[12 : 12 + length])
        scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    assert [s for s in scalars if s[0] == "reward/mean"] == [
        ("reward/mean", step, step / 2) for step in range(3)
    ]
    assert len(scalars) == 6


class Raises:
    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no network")

    def close(self) -> None:
        raise AssertionError("closed after it was given up")


class Blocks:
    def __init__(self) -> None:
        self.never = threading.Event()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.never.wait()

    def close(self) -> None:
        pass


class Exits(Blocks):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise SystemExit(1)


def cannot_start() -> Raises:
    raise RuntimeError("no account")


class Remembers:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append(step)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "start, reason",
    [
        (Raises, "no network"),
        (cannot_start, "no account"),
        (Blocks, "behind"),
        (Exits, "SystemExit"),
    ],
)
def test_a_failing_tracker_costs_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[], Raises],
    reason: str,
) -> None:
    """Raising, not starting, blocking, leaving: every step is recorded, others are told (ML-05)."""
    monkeypatch.setattr(trackers, "QUEUE_LENGTH", 5)
    steps = 3
    healthy = Remembers()
    with caplog.at_level(logging.WARNING):
        log = MetricsLog(tmp_path, trackers=[start])
        for step in range(20 if start is Blocks else steps):
            log.write(step, {"reward/mean": 0.0})
        log.close()
        log = MetricsLog(tmp_path, resume_step=99, trackers=[lambda: healthy])
        log.write(99, {"reward/mean": 1.0})
        log.close()
    assert len(caplog.records) == 1
    assert reason in caplog.text and "metrics.jsonl goes on" in caplog.text
    assert len(read_metrics(tmp_path)) == (20 if start is Blocks else steps) + 1
    assert healthy.seen == [99] and healthy.closed


def test_a_tracker_that_hangs_at_the_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedTracker(Blocks)
    guarded.write(0, {})
    guarded.close(seconds=0.05)
    assert "did not finish within 0.05 s" in caplog.text


def test_a_tracker_given_up_that_fails_later_is_not_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    until = threading.Event()

    class Late(Raises):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            until.wait()
            raise ConnectionError("timed out at last")

    guarded = GuardedTracker(Late)
    guarded.write(0, {})
    guarded.close(seconds=0.05)
    until.set()
    guarded._thread.join()
    assert len(caplog.records) == 1 and "did not finish" in caplog.text


def test_a_record_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    log = MetricsLog(tmp_path)
    log.write(0, {"reward/mean": 0.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        log.write(1, {"reward/mean": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be written" in caplog.text
    log.write(2, {"reward/mean": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 2]
