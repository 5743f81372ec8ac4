"""The metric that a checkpoint is kept for: its value, and whether it beats another one's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Measured"]


@dataclass(frozen=True)
class Measured:
    """A finite value of a metric, as a manifest keeps it."""

    metric: str
    mode: str
    """Which is better: max, the larger value, or min, the smaller."""
    value: float

    @classmethod
    def of(cls, metric: str, mode: str, value: float | None) -> Measured | None:
        """The value as something to compare; None if it is missing, NaN or infinite.

        >>> Measured.of("eval/score", "max", float("nan")) is None
        True
        """
        if value is None or not math.isfinite(value):
            return None
        return cls(metric, mode, float(value))

    @classmethod
    def in_manifest(cls, manifest: Mapping[str, Any]) -> Measured | None:
        """What a manifest says; None where it says nothing that can be compared."""
        kept: Any = manifest.get("measured")
        try:
            return cls.of(str(kept["metric"]), str(kept["mode"]), float(kept["value"]))
        except (TypeError, KeyError, ValueError):
            return None

    def to_manifest(self) -> dict[str, Any]:
        """As `in_manifest` reads it."""
        return {"measured": asdict(self)}

    def comparable(self, other: Measured | None) -> bool:
        """Whether the other one is of the same metric, judged the same way."""
        return other is not None and (self.metric, self.mode) == (other.metric, other.mode)

    def beats(self, other: Measured | None) -> bool:
        """Whether this is better; an equal value is not, and what cannot be compared is beaten."""
        if other is None or not self.comparable(other):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value
