"""How a section is timed, on our side and the peers' alike: the standard library alone."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """One section, ready to be timed."""

    call: Callable[[], Any]
    temp_bytes: int
    """Temporaries of the compiled program, by XLA's own account; arguments and results apart."""
    check: Callable[[Any], dict[str, float]]
    """Figures of the first call's result that another implementation can be held against."""
    tokens: int
    """Tokens a call works through."""
    stages: Callable[[], dict[str, float]] = dict
    """CPU seconds of the stages of the last call, where it has some."""


def measure(
    prepare: Callable[[], Work], repeats: int, wait: Callable[[Any], Any]
) -> dict[str, Any]:
    """Time one section in this process; the first call is apart from the repeats.

    Args:
        prepare: Makes the section, its inputs included.
        repeats: Timed calls. With 0, for work too long to repeat, the first call is the timed one,
            and what it compiles or allocates counts.
        wait: Returns its argument once that has been computed.
    """
    start = time.perf_counter()
    work = prepare()
    cpu, wall = [], []

    def timed() -> Any:
        at, used = time.perf_counter(), time.process_time()
        result = wait(work.call())
        cpu.append(time.process_time() - used)
        wall.append(time.perf_counter() - at)
        return result

    check = work.check(timed())
    first = time.perf_counter() - start
    if repeats:
        cpu.clear()
        wall.clear()
    for _ in range(repeats):
        timed()
    return {
        "cpu_s": statistics.median(cpu),
        "cpu_all_s": cpu,
        "wall_s": statistics.median(wall),
        "wall_min_s": min(wall),
        "setup_s": first,
        "tokens": work.tokens,
        "tokens_per_cpu_s": work.tokens / max(statistics.median(cpu), 1e-9),
        "temp_bytes": work.temp_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "repeats": len(cpu),
        "load": os.getloadavg()[0],
        "check": check,
        "stages": dict(work.stages()),
    }
