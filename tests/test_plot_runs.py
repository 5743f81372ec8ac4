"""`scripts/plot_runs.py`: the table is the mean and spread of the files, bad input is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxrl.metrics import MetricsLog

SCRIPT = Path(__file__).parents[1] / "scripts/plot_runs.py"


def record(folder: Path, scores: dict[int, float]) -> Path:
    with MetricsLog(folder, tensorboard=False) as log:
        for step, score in scores.items():
            log.write(step, {"eval/score": score, "reward/mean": score / 2})
    return folder


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_table_has_mean_and_spread_and_the_picture_is_there(tmp_path: Path) -> None:
    a = record(tmp_path / "a", {0: 0.1, 5: 0.5})
    b = record(tmp_path / "b", {0: 0.3, 5: 0.6})
    c = record(tmp_path / "c", {0: 0.25})
    done = call(tmp_path / "out.png", f"two seeds={a},{b}", f"one={c}")
    assert done.returncode == 0, done.stderr
    assert "| two seeds | 0.200 (0.100 to 0.300) | 0.550 (0.500 to 0.600) |" in done.stdout
    assert "| one | 0.250 |  |" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    other = call(tmp_path / "out.png", f"two seeds={a},{b}", "--metric", "reward/mean")
    assert "| two seeds | 0.100 (0.050 to 0.150) | 0.275 (0.250 to 0.300) |" in other.stdout


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = call(tmp_path / "out.png", "label only")
    assert done.returncode == 1 and "'label only' must read LABEL=DIR" in done.stderr
    done = call(tmp_path / "out.png", f"x={tmp_path / 'none'}")
    assert done.returncode == 1 and "none" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.png").exists()
    run = record(tmp_path / "run", {0: 0.1})
    done = call(tmp_path / "out.png", f"x={run}", "--metric", "reward/men")
    assert done.returncode == 1 and "no run has a metric 'reward/men'" in done.stderr
