"""Times jaxrl's parts on a small random Qwen3: CPU seconds, wall seconds, XLA temporaries, memory.

    python scripts/bench.py                                # every section, the sizes of the table
    python scripts/bench.py --only head_gradient sampler   # some of them
    python scripts/bench.py --small --repeats 2            # a quick look at whether all of it runs

The model: 20,711,936 parameters, 4 layers, hidden 256, vocabulary 32768, untied head, float32;
8 rows of 128 prompt and 384 response tokens, all real. Weights and inputs come from seeded NumPy
generators, so another library can be given the same ones and its results compared, not only its
times. Each section runs in a process of its own: its peak memory is its own, and includes the
interpreter, JAX, and the inputs. Compare CPU seconds (all threads) on a machine that is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bench_timing as timing
import jax
from bench_inputs import SMALL, Sizes
from bench_sections import SECTIONS

from jaxrl.provenance import provenance

MIB = 2**20


def measure(name: str, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Time one section in this process."""
    row = timing.measure(lambda: SECTIONS[name](sizes), repeats, jax.block_until_ready)
    return row | {"device": jax.devices()[0].device_kind}


def in_child(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one section in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", name, "--repeats", str(options.repeats)]
    done = subprocess.run(
        command + ["--small"] * options.small, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"section {name} failed with exit status {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def table(sections: dict[str, dict[str, Any]]) -> str:
    """Markdown, one row a section."""
    lines = [
        "| section | CPU s | wall s | tokens / CPU s | XLA temporaries MiB | peak RSS MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sections.items():
        lines.append(
            f"| {name} | {row['cpu_s']:.4g} | {row['wall_s']:.4g} | {row['tokens_per_cpu_s']:.4g} "
            f"| {row['temp_bytes'] / MIB:.1f} | {row['peak_rss_bytes'] / MIB:.0f} |"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION",
                        help=f"some of: {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="timed calls; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here too")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeats < 1 and not options.child:
        parser.error(f"--repeats {options.repeats}: give at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked."""
    options = parse(arguments)
    sizes = SMALL if options.small else Sizes()
    if options.child:
        print(json.dumps(measure(options.child, sizes, options.repeats)))
        return
    sections = {}
    for name in options.only or SECTIONS:
        sections[name] = in_child(name, options)
        print(f"{name}: {sections[name]['cpu_s']:.4g} CPU s", file=sys.stderr, flush=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": next(iter(sections.values()))["device"],
        "cpus": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **provenance(),
        "sizes": asdict(sizes),
        "sections": sections,
    }
    print(table(sections))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
