"""What the measurements of a row say: medians, ratios, whether a target is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bench_rows import MIB, OF_PRODUCTS, OURS, PRODUCTS, ROWS, Limit, Row

Sides = Mapping[str, Mapping[str, Any]]


def pooled(children: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One side's figures from those of its processes: the median of all timed calls."""
    timed = [seconds for child in children for seconds in child["cpu_all_s"]]
    loads = [child["load"] for child in children]
    return {
        "cpu_s": median(timed),
        "cpu_all_s": timed,
        "wall_s": median(child["wall_s"] for child in children),
        "first_call_s": median(child["setup_s"] for child in children),
        "temp_bytes": median(child["temp_bytes"] for child in children),
        "peak_rss_bytes": median(child["peak_rss_bytes"] for child in children),
        "tokens": children[0]["tokens"],
        "load": [min(loads), max(loads)],
        "check": _medians([child["check"] for child in children]),
        "stages": _medians([child["stages"] for child in children]),
        "versions": children[0].get("versions", {}),
    }


def _medians(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(figures[name] for figures in dicts) for name in dicts[0]}


def sides_of(kept: Mapping[str, Mapping[str, Any]], name: str) -> Sides | None:
    """A row's figures by side; None where ours are not there."""
    part_of = ROWS[name].part_of
    entry = kept.get(part_of[0] if part_of else name)
    if entry is None or part_of is None:
        return entry and entry["sides"]
    sides = entry["sides"]
    return {**sides, OURS: sides[part_of[1]]} if part_of[1] in sides else None


def least(row: Row, sides: Sides, of: Sequence[str], figure: str) -> float | None:
    """The smallest figure of the sides named, of those that were measured."""
    found = [float(sides[name][figure]) for name in of if name in sides]
    if PRODUCTS in of and PRODUCTS in sides and row.products:
        return sides[PRODUCTS]["cpu_s"] * row.products[1]
    return min(found, default=None)


class Verdict(NamedTuple):
    """How a figure stands to its target."""

    figure: str
    target: str
    reached: str


def named(limit: Limit) -> str:
    """A limit in words."""
    titles = ["products" if x == PRODUCTS else x for x in limit.of]
    if not titles:
        return f"{limit.times:g} MiB"
    return f"{limit.times:g}x {titles[0] if len(titles) == 1 else 'the least'}"


def judge_time(row: Row, sides: Sides) -> Verdict:
    """CPU seconds against the fastest of the limit's sides, or else the products."""
    ours, base = sides.get(OURS), least(row, sides, row.time.of, "cpu_s")
    products = least(row, sides, (PRODUCTS,), "cpu_s")
    target = f"at most {named(row.time)}"
    if ours is None or base is None and products is None:
        return Verdict("-", target, "not measured")
    seconds = ours["cpu_s"]
    figure = "-" if base is None else f"{seconds / base:.2f}x"
    if base is not None and seconds <= row.time.times * base:
        return Verdict(figure, target, "yes")
    if products is not None and seconds <= OF_PRODUCTS * products:
        return Verdict(figure, target, f"yes, at {seconds / products:.2f}x its products")
    return Verdict(figure, target, "not measured" if base is None else "no")


def judge_memory(row: Row, sides: Sides) -> Verdict:
    """Bytes against a side's, or against so many MiB."""
    limit, ours = row.memory, sides.get(OURS)
    if limit is None:
        return Verdict("", "", "")
    base = least(row, sides, limit.of, row.memory_is) if limit.of else float(MIB)
    target = f"at most {named(limit)}"
    if ours is None or base is None:
        return Verdict("-", target, "not measured")
    ratio = ours[row.memory_is] / base
    figure = f"{ratio:.2f}x" if limit.of else f"{ratio:.1f} MiB"
    return Verdict(figure, target, "yes" if ratio <= limit.times else "no")
