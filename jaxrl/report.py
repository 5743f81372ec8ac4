"""The picture a person looks at: curves of a run, or of several with their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.errors import DataError
from jaxrl.metrics import read_metrics

__all__ = ["PANELS", "Curve", "Panel", "compare_runs", "series", "write_report"]


@dataclass(frozen=True)
class Curve:
    """One metric in a panel; runs are compared by the first one that they have."""

    metric: str
    label: str


@dataclass(frozen=True)
class Panel:
    """One of the pictures."""

    title: str
    unit: str
    curves: tuple[Curve, ...]


PANELS = (
    Panel("Reward", "reward units", (Curve("reward/mean", "mean of the rollouts"),)),
    Panel("Held-out score", "reward units", (Curve("eval/score", "mean of the held-out prompts"),)),
    Panel(
        "KL divergence",
        "nats a token",
        (
            Curve("kl/reference", "policy from reference"),
            Curve("policy/approx_kl_k3", "new from old policy"),
        ),
    ),
    Panel("Value loss", "reward units squared", (Curve("value/loss", "value loss"),)),
    Panel(
        "Explained variance",
        "fraction",
        (Curve("value/explained_variance", "of the returns by the values"),),
    ),
    Panel(
        "Response length",
        "tokens",
        (
            Curve("rollout/response_length", "rollouts"),
            Curve("eval/response_length", "held-out"),
        ),
    ),
)
MARKED_UP_TO = 60
"""A series with more points than this is drawn without a dot on each."""

Points = dict[int, float]
Rows = Sequence[Mapping[str, Any]]


def write_report(run_dir: Path | str) -> Path:
    """Draw the curves of a run into `run_dir`/curves.png; a metric never recorded says so.

    Raises:
        DataError: the run has no metrics.
    """
    rows = _rows(run_dir)
    figure, panels = _figure(_title(Path(run_dir), rows), _last_step([rows]))
    for panel, axes in zip(PANELS, panels, strict=True):
        drawn = 0
        for index, curve in enumerate(panel.curves):
            points = series(rows, curve.metric)
            if _finite(points):
                axes.plot(
                    list(points), list(points.values()), label=curve.label, **_style(points, index)
                )
                drawn += 1
        _finish(axes, drawn, legend=len(panel.curves) > 1)
    return _save(figure, Path(run_dir) / "curves.png")


def compare_runs(run_dirs: Sequence[Path | str], labels: Sequence[str], out: Path | str) -> Path:
    """Draw runs over each other into the file `out`; runs with one label are seeds of one setting.

    Of each label the mean over its seeds, and as a band the smallest to the largest. The mean at a
    step is over the seeds that recorded it.

    Raises:
        DataError: a run has no metrics, or there is not one label for each run.
    """
    if len(run_dirs) != len(labels) or not labels:
        raise DataError(
            f"{len(run_dirs)} runs and {len(labels)} labels were given; give one label for each "
            "run, the same label for seeds of the same setting"
        )
    groups: dict[str, list[Rows]] = {}
    for run_dir, label in zip(run_dirs, labels, strict=True):
        groups.setdefault(label, []).append(_rows(run_dir))
    everything = [rows for runs in groups.values() for rows in runs]
    title = "Mean over seeds; the band reaches from the smallest to the largest"
    figure, panels = _figure(title, _last_step(everything))
    for panel, axes in zip(PANELS, panels, strict=True):
        curve = next(
            (c for c in panel.curves if any(_finite(series(r, c.metric)) for r in everything)),
            panel.curves[0],
        )
        if len(panel.curves) > 1:
            axes.set_title(f"{panel.title}: {curve.label}", fontsize=11)
        drawn = 0
        for index, (label, runs) in enumerate(groups.items()):
            mean, low, high = spread([series(rows, curve.metric) for rows in runs])
            if not mean:
                continue
            drawn += 1
            style, steps = _style(mean, index), list(mean)
            count = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
            axes.plot(steps, list(mean.values()), label=f"{label} ({count})", **style)
            axes.fill_between(
                steps,
                list(low.values()),
                list(high.values()),
                color=style["color"],
                alpha=0.18,
                linewidth=0,
            )
        _finish(axes, drawn, legend=True)
    return _save(figure, Path(out))


def series(rows: Rows, metric: str) -> Points:
    """A metric by step, where it was recorded; NaN where it was not finite, which leaves a gap."""
    return {
        row["step"]: row[metric] if math.isfinite(row[metric]) else math.nan
        for row in rows
        if metric in row
    }


def spread(seeds: Sequence[Points]) -> tuple[Points, Points, Points]:
    """Mean, smallest and largest at each step, over the seeds that have a finite value there."""
    at: dict[int, list[float]] = {}
    for points in seeds:
        for step, value in points.items():
            if math.isfinite(value):
                at.setdefault(step, []).append(value)
    steps = sorted(at)
    return (
        {step: math.fsum(at[step]) / len(at[step]) for step in steps},
        {step: min(at[step]) for step in steps},
        {step: max(at[step]) for step in steps},
    )


def _finite(points: Points) -> list[float]:
    return [value for value in points.values() if math.isfinite(value)]


def _last_step(runs: Sequence[Rows]) -> int:
    return max(rows[-1]["step"] for rows in runs)


def _rows(run_dir: Path | str) -> Rows:
    rows = read_metrics(run_dir)
    if not rows:
        raise DataError(
            f"{Path(run_dir) / 'metrics.jsonl'} is missing or empty; give the folder of a run that "
            "has finished at least one iteration"
        )
    return rows


def _title(run_dir: Path, rows: Rows) -> str:
    title = f"{run_dir.resolve().name}: {rows[-1]['step']} iterations"
    held_out = _finite(series(rows, "eval/score"))
    if len(held_out) > 1:
        title += f", held-out score {held_out[0]:.3f} to {held_out[-1]:.3f}"
    return title


def _figure(title: str, last_step: int) -> tuple[Any, list[Any]]:
    """A figure of its own, so that neither a display nor matplotlib's global state is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = list(figure.subplots(2, 3).flat)
    for panel, axes in zip(PANELS, panels, strict=True):
        axes.set_title(panel.title, fontsize=11)
        axes.set_xlim(-0.02 * last_step, max(1.02 * last_step, 1))
        axes.set_xlabel("iteration", fontsize=9)
        axes.set_ylabel(panel.unit, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, panels


def _style(points: Points, index: int) -> dict[str, Any]:
    marker = "o" if len(points) <= MARKED_UP_TO else ""
    return {"color": f"C{index}", "linewidth": 1.6, "marker": marker, "markersize": 3}


def _finish(axes: Any, drawn: int, *, legend: bool) -> None:
    if not drawn:
        axes.text(
            0.5,
            0.5,
            "not recorded",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color="0.5",
        )
        axes.set_xticks([])
        axes.set_yticks([])
    elif legend:
        axes.legend(fontsize=8, frameon=False)


def _save(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
    return out
