"""Runs over each other in one picture, and one metric of them as a table.

    python scripts/plot_runs.py docs/critics.png "head=runs/head-0,runs/head-1" "grpo=runs/grpo-0"

Runs behind one label are seeds of one setting: the picture has their mean and spread, the table
each of them and their mean.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from jaxrl.errors import DataError, JaxrlError
from jaxrl.metrics import read_metrics
from jaxrl.report import compare_runs, series


def main() -> int:
    """Draw and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the picture, a PNG file")
    parser.add_argument("runs", nargs="+", metavar="LABEL=DIR,DIR,...")
    parser.add_argument(
        "--metric", default="eval/score", help="what the table shows (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        groups = dict(_parsed(text) for text in arguments.runs)
        folders = [folder for group in groups.values() for folder in group]
        labels = [label for label, group in groups.items() for _ in group]
        compare_runs(folders, labels, arguments.out)
        print(table(groups, arguments.metric))
    except JaxrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\npicture: {arguments.out}")
    return 0


def _parsed(text: str) -> tuple[str, list[str]]:
    label, equals, folders = text.partition("=")
    if not (label and equals and folders):
        raise DataError(f"{text!r} must read LABEL=DIR,DIR,...")
    return label, folders.split(",")


def table(groups: dict[str, list[str]], metric: str) -> str:
    """Markdown: a row a label, `metric` by iteration as mean (smallest to largest)."""
    scores = {
        label: [series(read_metrics(folder), metric) for folder in folders]
        for label, folders in groups.items()
    }
    steps = sorted({step for runs in scores.values() for run in runs for step in run})
    if not steps:
        raise DataError(f"no run has a metric {metric!r}; see their metrics.jsonl")
    lines = [f"| | {' | '.join(map(str, steps))} |", f"|---|{'---|' * len(steps)}"]
    for label, runs in scores.items():
        lines.append(f"| {label} | {' | '.join(_cell(runs, step) for step in steps)} |")
    return "\n".join(lines)


def _cell(runs: list[dict[int, float]], step: int) -> str:
    values = [run[step] for run in runs if step in run]
    if not values:
        return ""
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
