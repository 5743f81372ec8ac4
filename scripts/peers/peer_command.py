"""A peer's command line: `python FILE SECTION --repeats N [--small]`; prints one line of JSON.

The programs run in the peers' own environments, where neither jaxrl nor our jax is; they share
with `bench.py` the inputs and the clock, which need NumPy alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Behind what is installed: names here, like `train`, are not to hide a package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench_inputs import SMALL, Sizes
from bench_timing import Work, measure

Section = Callable[[Sizes], Work]


def temporaries(program: Any) -> int:
    """Bytes XLA plans for temporaries of a compiled program; 0 where the backend does not say."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


def main(sections: dict[str, Section], packages: Sequence[str], wait: Callable[[Any], Any]) -> None:
    """Time the section that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=sections)
    parser.add_argument("--repeats", type=int, default=5, help="0 times the first call")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    prepare, sizes = sections[options.section], SMALL if options.small else Sizes()
    row = measure(lambda: prepare(sizes), options.repeats, wait)
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps(row | {"versions": {"python": platform.python_version(), **versions}}))
