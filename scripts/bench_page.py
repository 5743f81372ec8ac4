"""The page that `bench_table.py` writes, from what it has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench_rows import MIB, OURS, PEERS, PRODUCTS, ROWS, Row
from bench_verdicts import Sides, judge_memory, judge_time, least, sides_of

Kept = Mapping[str, Mapping[str, Any]]
HEAD = """# jaxrl beside its peers

Written by `scripts/bench_peers.sh`, which installs the peers, each in an environment of its own,
runs the same work in turn with us and with them, and keeps the figures in `docs/bench.json`.
CPU seconds of the whole process, kept on one CPU, medians of at least five calls. MiB are XLA's
temporaries or, of torch and of whole iterations, the peak of the process, interpreter and libraries
included. Everybody gets the same weights and inputs (`scripts/bench_inputs.py`), and the steps give
the same losses and gradient norms (`check` in the JSON). A time within 1.2x of the step's own
matrix products, measured in the same rounds, counts as reached.
"""


def cell(side: Mapping[str, Any] | None, memory_is: str) -> str:
    """CPU seconds and MiB of one side."""
    if side is None:
        return "-"
    seconds, memory = side["cpu_s"], side[memory_is] / MIB
    time = f"{seconds * 1000:.3g} ms" if seconds < 0.5 else f"{seconds:.3g} s"
    if memory == 0:
        return time
    return f"{time}, {memory:.4g} MiB" + (" of process" if memory_is == "peak_rss_bytes" else "")


def row_line(row: Row, sides: Sides) -> str:
    """A row of the table."""
    cells = [row.work, cell(sides.get(OURS), row.memory_is)]
    for name, peer in PEERS.items():
        whole = row.memory_is == "peak_rss_bytes"
        cells.append(cell(sides.get(name), row.memory_is if whole else peer.memory))
    time, memory = judge_time(row, sides), judge_memory(row, sides)
    return "| " + " | ".join([*cells, *time, *memory]) + " |"


def products_line(row: Row, sides: Sides) -> str | None:
    """How far a time is from that of its matrix products."""
    products = least(row, sides, (PRODUCTS,), "cpu_s")
    if products is None or OURS not in sides:
        return None
    ratio = sides[OURS]["cpu_s"] / products
    return f"- {row.work}: {ratio:.2f}x its matrix products' {products:.3g} CPU s"


def parts_line(title: str, side: Mapping[str, Any]) -> str | None:
    """Where the seconds of an iteration went, by its own account, and what is left."""
    stages = {name.removesuffix("_s"): seconds for name, seconds in side["stages"].items()}
    if not stages:
        return None
    whole = side["cpu_s"]
    outside = whole - sum(seconds for name, seconds in stages.items() if name != "pack")
    words = ", ".join(f"{name} {seconds:.3g}" for name, seconds in stages.items())
    return (
        f"- {title}: {words} of {whole:.4g} CPU s, {whole / side['tokens']:.4f} a response token; "
        f"{1 - outside / whole:.1%} inside the sampler and the steps"
    )


def table(kept: Kept) -> str:
    """The table of the rows that were measured."""
    heads = ["work", OURS, *(peer.title for peer in PEERS.values()), "time", "target", "reached?",
             "memory", "target", "reached?"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    found = {name: sides for name in ROWS if (sides := sides_of(kept, name))}
    return "\n".join(lines + [row_line(ROWS[name], sides) for name, sides in found.items()])


def run_line(row: Row, entry: Mapping[str, Any]) -> str:
    """When a row was measured, on what code, and under which load."""
    sides = entry["sides"].values()
    loads = [load for side in sides for load in side["load"]]
    calls = min(len(side["cpu_all_s"]) for side in sides)
    commit = str(entry["git_commit"])
    code = commit[:7] + commit[40:]  # "-dirty" stays
    return (
        f"- {row.work}: {entry['date']}, code {code}, {entry['cpus']} CPUs, "
        f"load {min(loads):.1f} to {max(loads):.1f}, {calls} calls or more a side"
    )


def versions_line(kept: Kept, side: str) -> str | None:
    """What a side was last measured with."""
    entries = [entry for entry in kept.values() if side in entry["sides"]]
    if not entries:
        return None
    entry = max(entries, key=lambda entry: entry["date"])
    versions = entry["versions"] if side == OURS else entry["sides"][side]["versions"]
    title = PEERS[side].title if side in PEERS else side
    return f"- {title}: " + ", ".join(f"{name} {version}" for name, version in versions.items())


def page(kept: Kept, peers: Sequence[str], rows: Sequence[str]) -> str:
    """The whole page.

    Args:
        kept: The rows that were measured.
        peers: Those that are not installed.
        rows: Those that we have no section for.
    """
    there = {name: (row, kept[name]) for name, row in ROWS.items() if name in kept}
    sections = {
        "": [table(kept)],
        "Against the matrix products": [products_line(r, e["sides"]) for r, e in there.values()],
        "Where an iteration's CPU seconds go": [
            parts_line(f"{row.work}, {side}", figures)
            for row, entry in there.values()
            for side, figures in entry["sides"].items()
        ],
        "Left out": [
            *(f"- {PEERS[name].title}: {name} is not installed here" for name in peers),
            *(f"- {ROWS[name].work}: `bench.py` has no section {ROWS[name].ours}" for name in rows),
        ],
        "When": [run_line(*measured) for measured in there.values()],
        "Versions": [versions_line(kept, side) for side in (OURS, *PEERS)],
    }
    text = [HEAD.rstrip()]
    for title, lines in sections.items():
        if filled := [line for line in lines if line]:
            text.append("\n".join(([f"## {title}", ""] if title else []) + filled))
    return "\n\n".join(text) + "\n"
