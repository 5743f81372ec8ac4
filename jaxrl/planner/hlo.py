"""Collectives in the text of a compiled program: how many, how often, how large, and of what.

The text lists computations; a loop names its body and condition, a fusion what it calls. How often
a loop runs is stated by the compilers for CPUs and GPUs; in a TPU's program it is the constant that
its condition compares with. A loop that has neither depends on the data: the caller says how often.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxrl.planner.memory import Collective

__all__ = ["collectives_of", "gathered_shapes"]

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_OP = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\(")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}


@dataclass
class _Computation:
    """What matters of one: its collectives, and what it runs how often."""

    collectives: list[tuple[str, str]] = field(default_factory=list)
    """Kind and result, as text."""
    runs: list[tuple[str, int | None]] = field(default_factory=list)
    """Name and times; None depends on the data."""
    constants: list[int] = field(default_factory=list)


def collectives_of(text: str, data_trips: Callable[[int], int]) -> tuple[Collective, ...]:
    """Exchanges of each kind in one execution of the program.

    Args:
        text: The compiled program.
        data_trips: How often a loop is taken whose length depends on the data, given how many such
            loops it lies in.
    """
    ops: dict[str, int] = defaultdict(int)
    times: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    for kind, result, runs in _walk(text, data_trips):
        ops[kind] += 1
        times[kind] += runs
        size[kind] += runs * sum(math.prod(dims) * width for width, dims in _shapes(result))
    return tuple(
        Collective(kind, ops[kind], times[kind], size[kind]) for kind in KINDS if ops[kind]
    )


def gathered_shapes(text: str) -> Iterator[tuple[int, ...]]:
    """Shape of everything that an all-gather gives."""
    for kind, result, _ in _walk(text, lambda depth: 1):
        if kind == "all-gather":
            yield from (dims for _, dims in _shapes(result))


def _walk(text: str, data_trips: Callable[[int], int]) -> Iterator[tuple[str, str, int]]:
    """Kind, result and executions of each collective."""
    computations, entry = _parse(text)

    def visit(name: str, runs: int, depth: int) -> Iterator[tuple[str, str, int]]:
        here = computations[name]
        # In a TPU's program a reduce-scatter is a fusion around an all-reduce.
        scatters = "all-reduce-scatter" in name
        for kind, result in here.collectives:
            yield ("reduce-scatter" if scatters else kind), result, runs
        for called, trips in here.runs:
            if called in computations:
                inner = data_trips(depth) if trips is None else trips
                yield from visit(called, runs * inner, depth + (trips is None))

    yield from visit(entry, 1, 0)


def _parse(text: str) -> tuple[Mapping[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    loops: list[tuple[_Computation, str, str, int | None]] = []
    entry, here = "", _Computation()
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            here = computations.setdefault(header[2], _Computation())
            entry = header[2] if header[1] else entry
            continue
        here.constants += [int(n) for n in _CONSTANT.findall(line)]
        found = _OP.match(line)
        if not found:
            continue
        result, op = found[1], found[2]
        # An asynchronous pair counts where it is done: the start's result has the operands in it.
        kind = op.removesuffix("-done")
        if kind in KINDS:
            here.collectives.append((kind, result))
        called = dict(_CALLED.findall(line))
        if op == "while":
            stated = _TRIPS.search(line)
            trips = int(stated[1]) if stated else None
            loops.append((here, called["body"], called["condition"], trips))
        elif op not in ("all-reduce", "reduce-scatter", "all-reduce-start", "reduce", "scatter"):
            here.runs += [(name, 1) for name in called.values()]
            for branches in _BRANCHES.findall(line):
                here.runs += [(name.strip(" %"), 1) for name in branches.split(",")]
    for owner, body, condition, trips in loops:
        constants = computations[condition].constants if condition in computations else []
        owner.runs.append((body, constants[0] if trips is None and len(constants) == 1 else trips))
    return computations, entry


def _shapes(result: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Bytes of an element, and sizes, of every array in a result."""
    for dtype, sizes in _SHAPE.findall(result):
        yield _BYTES.get(dtype, 4), tuple(int(n) for n in sizes.split(",") if n)
