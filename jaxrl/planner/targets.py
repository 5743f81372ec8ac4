"""What is planned for: how many devices of which kind, and who is asked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxrl.errors import ConfigError

__all__ = ["CHIPS", "Chip", "Target", "parse_bytes", "parse_target"]

GRAMMAR = (
    "analytic:DEVICES, analytic:CHIP:DEVICES, cpu:DEVICES, cuda:h100:SLICESxHOSTSxDEVICES or "
    "tpu:CHIP:TOPOLOGY (v5e:2x4, v5p:4x4x4)"
)
_DEVICES_A_HOST = {"analytic": 8, "cpu": 8, "tpu": 4}
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Chip:
    """Public figures of an accelerator."""

    hbm: int
    """Bytes that a program can use, as its compiler sees them."""
    flops: float
    """Dense bfloat16 products a second, at peak."""
    platform: str
    dimensions: int = 3
    """Of the topologies it comes in."""


CHIPS = {
    "h100": Chip(84942979072, 989.4e12, "cuda"),
    "v5e": Chip(int(15.75 * 2**30), 197e12, "tpu", dimensions=2),
    "v5p": Chip(int(95.74 * 2**30), 459e12, "tpu"),
    "v6e": Chip(int(31.25 * 2**30), 918e12, "tpu", dimensions=2),
}


@dataclass(frozen=True)
class Target:
    """Devices, and whose word is taken."""

    kind: str
    """"analytic": formulas; "cpu", "cuda", "tpu": the compiler of that name."""
    devices: int
    chip: str | None = None
    topology: str | None = None
    devices_a_host: int = 1

    def __str__(self) -> str:
        """As it is written on the command line."""
        parts = (self.kind, self.chip, self.topology or str(self.devices))
        return ":".join(part for part in parts if part)

    @property
    def hbm(self) -> int | None:
        """Bytes of a device, where the kind of device is known."""
        return CHIPS[self.chip].hbm if self.chip else None

    @property
    def compiles(self) -> bool:
        """Whether a compiler is asked."""
        return self.kind != "analytic"


def parse_target(text: str) -> Target:
    """Read `text`, written as `GRAMMAR` says.

    Raises:
        ConfigError: It is not, or the kind of device or its topology is not known.
    """
    kind, *rest = text.split(":")
    numbers = rest[-1] if rest else ""
    if kind not in ("analytic", "cpu", "cuda", "tpu") or not re.fullmatch(
        r"[1-9]\d*(x[1-9]\d*)*", numbers
    ):
        raise ConfigError(f"target {text!r} is none of {GRAMMAR}")
    sizes = [int(part) for part in numbers.split("x")]
    chip = rest[0] if len(rest) == 2 else None
    if kind == "analytic" and len(rest) <= 2 and len(sizes) == 1:
        _known(text, chip, None)
        return Target(kind, sizes[0], chip, devices_a_host=min(sizes[0], _DEVICES_A_HOST[kind]))
    if kind == "cpu" and len(rest) == 1 and len(sizes) == 1:
        return Target(kind, sizes[0], devices_a_host=min(sizes[0], _DEVICES_A_HOST[kind]))
    if kind in ("cuda", "tpu") and len(rest) == 2:
        dimensions = _known(text, chip, kind)
        if len(sizes) != dimensions:
            raise ConfigError(
                f"target {text!r}: the topology of {chip} has {dimensions} sizes, e.g. "
                f"{kind}:{chip}:{'x'.join(['2'] * dimensions)}"
            )
        on_host = sizes[-1] if kind == "cuda" else min(math.prod(sizes), _DEVICES_A_HOST[kind])
        return Target(kind, math.prod(sizes), chip, numbers, on_host)
    raise ConfigError(f"target {text!r} is none of {GRAMMAR}")


def _known(text: str, chip: str | None, platform: str | None) -> int:
    """Sizes that a topology of this chip has."""
    allowed = sorted(n for n, c in CHIPS.items() if platform in (None, c.platform))
    if chip is None and platform is None:
        return 1
    if chip not in allowed:
        raise ConfigError(f"target {text!r}: {chip!r} is not known; expected one of {allowed}")
    return CHIPS[chip].dimensions


def parse_bytes(text: str) -> int:
    """Read "80GiB", "95.74G", "512MiB" or plain bytes; units are powers of 1024.

    Raises:
        ConfigError: It reads otherwise, or is not positive.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if not found or not float(found[1]):
        raise ConfigError(f"{text!r} is no size; write e.g. 80GiB")
    return int(float(found[1]) * 1024 ** _UNITS[found[2]])
