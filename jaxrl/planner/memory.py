"""What a plan says, the same for every target: memory of each step, the whole, the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Collective", "Remedy", "StepMemory", "Verdict", "step_from_json"]


@dataclass(frozen=True)
class Collective:
    """All exchanges of one kind in one execution of a step."""

    kind: str
    """"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"."""
    ops: int
    """In the program's text."""
    executions: int
    """With the iterations of the loops around them."""
    bytes: int
    """Of their results on one device, all executions together."""


@dataclass(frozen=True)
class StepMemory:
    """One step's program on one device, in bytes."""

    step: str
    """"score", "update" or "sample"."""
    source: str
    """"estimate", or the compiler: "cpu", "cuda", "tpu"."""
    arguments: int
    """What the program reads; the exact sum of shards for an estimate."""
    temporaries: int
    peak: int
    """Arguments, temporaries and outputs at the worst moment."""
    beside: int
    """What lies on the device meanwhile and is no argument of this step."""
    aliased: int = 0
    """Arguments whose memory the outputs take over (donated)."""
    expected_arguments: int = 0
    """Compilers: the shards of what the program reads, added up by us."""
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Estimates: what the temporaries are made of."""
    seconds: float = 0.0
    """Of tracing and compilation."""
    collectives: tuple[Collective, ...] = ()
    gathered_logits: tuple[str, ...] = ()
    """Shapes of all-gathers that look like logits or a whole head; there should be none."""
    refused: str | None = None
    """The compiler's own words, if it would not compile; the figures are then 0."""
    allowance: int = 0
    """For what no compiler knows: contexts, communication buffers, libraries' workspaces."""

    @property
    def needed(self) -> int:
        """Bytes of a device during this step."""
        return self.peak + self.beside + self.allowance


@dataclass(frozen=True)
class Remedy:
    """A change of settings, and what the plan says with it."""

    overrides: tuple[str, ...]
    needed: int
    fits: bool
    cost: str
    """What it costs."""


@dataclass(frozen=True)
class Verdict:
    """A plan."""

    target: str
    model: str
    parameters: int
    mesh: Mapping[str, int]
    layout: Mapping[str, int]
    """Updates, micro-batches, rows, row length and policy tokens of the largest batch."""
    hbm: int | None
    """Bytes of a device that the verdict is about."""
    held: Mapping[str, int]
    """Bytes that lie on one device, exactly, from the shardings."""
    steps: tuple[StepMemory, ...]
    host: Mapping[str, int]
    """Estimated bytes on one host."""
    flops: Mapping[str, float]
    """Of an iteration with responses of the given length, on all devices."""
    seconds: Mapping[str, float]
    """Of score and update at the given utilisation, where the chip is known."""
    fits: bool | None
    """None: no size of memory was given."""
    reason: str
    remedies: tuple[Remedy, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes of a device at the worst moment."""
        return max(step.needed for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {"needed": self.needed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """What `to_json` gave."""
        steps = tuple(step_from_json(step) for step in values["steps"])
        remedies = tuple(
            Remedy(**{**r, "overrides": tuple(r["overrides"])}) for r in values["remedies"]
        )
        names = {field.name for field in dataclasses.fields(cls)}
        plain = {name: value for name, value in values.items() if name in names}
        return cls(**{**plain, "steps": steps, "remedies": remedies})


def step_from_json(values: Mapping[str, Any]) -> StepMemory:
    """What `dataclasses.asdict` gave."""
    found = tuple(Collective(**c) for c in values["collectives"])
    gathered = tuple(values["gathered_logits"])
    return StepMemory(**{**values, "collectives": found, "gathered_logits": gathered})
