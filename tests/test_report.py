"""The pictures: what is drawn is what was recorded."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxrl.errors import DataError
from jaxrl.metrics import METRICS, MetricsLog
from jaxrl.report import PANELS, compare_runs, series, spread, write_report


def record(run_dir: Path, rows: Mapping[int, Mapping[str, float]]) -> Path:
    with MetricsLog(run_dir) as log:
        for step, values in rows.items():
            log.write(step, values)
    return run_dir


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved, to look inside."""
    saved: list[Figure] = []
    real = Figure.savefig

    def savefig(self: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        real(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def lines(figure: Figure, title: str) -> dict[str, tuple[list[float], list[float]]]:
    (axes,) = [axes for axes in figure.axes if axes.get_title().startswith(title)]
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore
        for line in axes.get_lines()
    }


def texts(figure: Figure, title: str) -> list[str]:
    (axes,) = [axes for axes in figure.axes if axes.get_title().startswith(title)]
    return [text.get_text() for text in axes.texts]


def test_every_curve_is_a_known_metric() -> None:
    assert {curve.metric for panel in PANELS for curve in panel.curves} <= set(METRICS)
    assert [panel.title for panel in PANELS] == [
        "Reward",
        "Held-out score",
        "KL divergence",
        "Value loss",
        "Explained variance",
        "Response length",
    ]


def test_curves_of_a_run(tmp_path: Path, figures: list[Figure]) -> None:
    run_dir = record(
        tmp_path / "first",
        {
            0: {"eval/score": 0.25},
            1: {"reward/mean": 0.5, "value/loss": math.nan, "kl/reference": 0.0},
            2: {"reward/mean": math.inf, "value/loss": math.nan, "kl/reference": 0.1},
            3: {"reward/mean": 0.75, "eval/score": 0.5, "policy/approx_kl_k3": 0.01},
        },
    )
    path = write_report(run_dir)
    assert path == run_dir / "curves.png"
    assert imread(path).shape[0] > 600 and imread(path).std() > 0.02
    (figure,) = figures
    assert figure.get_suptitle() == "first: 3 iterations, held-out score 0.250 to 0.500"
    (reward,) = lines(figure, "Reward").values()
    assert reward[0] == [1, 2, 3]
    assert reward[1][0] == 0.5 and math.isnan(reward[1][1]) and reward[1][2] == 0.75
    (held_out,) = lines(figure, "Held-out").values()
    assert held_out == ([0, 3], [0.25, 0.5])
    assert lines(figure, "KL") == {
        "policy from reference": ([1, 2], [0.0, 0.1]),
        "new from old policy": ([3], [0.01]),
    }
    for missing in ("Value loss", "Explained variance", "Response length"):
        assert texts(figure, missing) == ["not recorded"] and not lines(figure, missing)
    assert texts(figure, "Reward") == []


def test_runs_side_by_side(tmp_path: Path, figures: list[Figure]) -> None:
    rewards = {"a": [0.0, 0.4], "b": [0.2, 0.8], "c": [0.1, 0.1]}
    runs = [
        record(
            tmp_path / name,
            {
                step: {"reward/mean": value, "policy/approx_kl_k3": 0.5}
                for step, value in enumerate(values, 1)
            },
        )
        for name, values in rewards.items()
    ]
    out = compare_runs(runs, ["ppo", "ppo", "grpo"], tmp_path / "plots" / "both.png")
    assert out.stat().st_size > 10_000
    (figure,) = figures
    drawn = lines(figure, "Reward")
    assert drawn["ppo (2 seeds)"] == ([1, 2], [0.1, pytest.approx(0.6)])
    assert drawn["grpo (1 seed)"] == ([1, 2], [0.1, 0.1])
    # Without a reference the panel falls back to what there is, and says so.
    assert "KL divergence: new from old policy" in [axes.get_title() for axes in figure.axes]
    assert len(lines(figure, "KL")) == 2
    assert texts(figure, "Value loss") == ["not recorded"]


def test_spread_is_over_the_seeds_that_have_the_step() -> None:
    mean, low, high = spread([{0: 1.0, 5: 4.0}, {0: 3.0, 5: math.nan}, {7: 2.0}])
    assert mean == {0: 2.0, 5: 4.0, 7: 2.0}
    assert low == {0: 1.0, 5: 4.0, 7: 2.0}
    assert high == {0: 3.0, 5: 4.0, 7: 2.0}


def test_series_takes_only_steps_with_the_metric() -> None:
    assert series([{"step": 0}, {"step": 1, "a": 2.0}], "a") == {1: 2.0}


def test_nothing_recorded_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="metrics.jsonl is missing or empty"):
        write_report(tmp_path)
    with pytest.raises(DataError, match="2 runs and 1 labels"):
        compare_runs([tmp_path, tmp_path], ["one"], tmp_path / "x.png")


def test_importing_the_report_does_not_import_matplotlib() -> None:
    code = "import sys, jaxrl.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
