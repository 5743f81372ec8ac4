"""The record of a process that keeps none: of several, the first one writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.metrics import MetricsLog

__all__ = ["Unrecorded"]


class Unrecorded(MetricsLog):
    """Takes what `MetricsLog` takes, and drops it."""

    def __init__(self) -> None:
        """Open nothing."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
