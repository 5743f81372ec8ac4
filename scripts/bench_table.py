"""Measures jaxrl beside its peers, turn by turn, and writes docs/bench.json and docs/bench.md.

    python scripts/bench_table.py                            # every row; two hours on two cores
    python scripts/bench_table.py --only policy_step gae     # some rows, the others as they were
    python scripts/bench_table.py --only head --repeats 9    # more calls in each process
    python scripts/bench_table.py --print                    # the table of what was measured

scripts/bench_peers.sh installs the peers and calls this. Each round runs our section and then each
peer's, every one in a process of its own; all calls of all rounds count for the median. A peer
that is not installed is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench_page import page
from bench_rows import OURS, PEERS, PRODUCTS, ROWS, Row
from bench_sections import SECTIONS
from bench_verdicts import pooled

from jaxrl.provenance import provenance

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
KEPT, PAGE = ROOT / "docs" / "bench.json", ROOT / "docs" / "bench.md"
VENVS = Path(os.environ.get("JAXRL_PEERS", ROOT / ".venv-peers"))
MEASURED = [name for name, row in ROWS.items() if not row.part_of]
# One thread for everybody (see `pin`), so that CPU seconds compare; no device, no model hub.
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


class Program(NamedTuple):
    """What measures one side of a row, but for the repeats."""

    side: str
    command: list[str]
    repeats: int


class Failed(Exception):
    """A program did not measure its section."""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, installed or not."""
    return VENVS / peer / "bin" / "python"


def programs(row: Row, repeats: int | None = None) -> Iterator[Program]:
    """Ours first, then everybody else who is there; `repeats` in place of the row's own."""
    mine = {OURS: row.ours} | ({PRODUCTS: row.products[0]} if row.products else {})
    mine |= {side: section for side, section in row.others.items() if side not in PEERS}
    ours = [sys.executable, str(SCRIPTS / "bench.py"), "--child"]
    for side, section in mine.items():
        if section in SECTIONS:
            yield Program(side, [*ours, section], row.repeats if repeats is None else repeats)
    theirs = row.repeats if row.peers_repeats is None else row.peers_repeats
    for side, section in row.others.items():
        if side in PEERS and python_of(side).exists():
            command = [str(python_of(side)), str(SCRIPTS / "peers" / PEERS[side].program), section]
            yield Program(side, command, theirs if repeats is None else repeats)


def run(program: Program, small: bool) -> dict[str, Any]:
    """The last line of a process's output, which is JSON; Failed with what it said if it failed."""
    done = subprocess.run(
        [*program.command, "--repeats", str(program.repeats), *["--small"] * small],
        capture_output=True, text=True, check=False, env=os.environ | QUIET,
    )  # fmt: skip
    if done.returncode:
        words = " ".join(program.command)
        raise Failed(f"{done.stderr[-3000:]}\n{words}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(row: Row, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All sides of a row, in turn, round after round."""
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(options.rounds or row.rounds):
        for program in programs(row, options.repeats):
            child = run(program, options.small)
            found.setdefault(program.side, []).append(child)
            words = f"{child['cpu_s']:.4g} CPU s, load {child['load']:.1f}"
            print(f"  round {turn + 1}, {program.side}: {words}", file=sys.stderr, flush=True)
    return {side: pooled(children) for side, children in found.items()}


def pin() -> None:
    """Keep this process and its children on one CPU; else XLA runs parts of a program abreast."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def origin() -> dict[str, Any]:
    """The day, the code and what it ran with."""
    day = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    return {"date": day, "cpus": os.cpu_count(), **provenance()}


def missing() -> tuple[list[str], list[str]]:
    """Peers that are not installed, and rows that we have no section for."""
    peers = [name for name in PEERS if not python_of(name).exists()]
    return peers, [name for name, row in ROWS.items() if row.ours not in SECTIONS]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MEASURED, metavar="ROW",
                        help=f"some of: {', '.join(MEASURED)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="by default 3; 5 of rows that take minutes")
    parser.add_argument("--repeats", type=int, help="timed calls in each process, by default 3")
    parser.add_argument("--small", action="store_true", help="tiny sizes; nothing is written")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, keep, print, write; 1 if a program failed."""
    options = parse(arguments)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    wanted = [] if options.print else options.only or MEASURED
    failed = False
    pin()
    for name in wanted:
        row = ROWS[name]
        if row.ours not in SECTIONS:
            continue
        print(row.work, file=sys.stderr, flush=True)
        try:
            measured = {**origin(), "sides": measure(row, options)}
        except Failed as error:
            print(error, file=sys.stderr, flush=True)
            failed = True
            continue
        kept[name] = measured
        if not options.small:
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    text = page(kept, *missing())
    print(text)
    if not options.small:
        PAGE.write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
