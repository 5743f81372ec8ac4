"""What would make a plan fit: changes of settings, each tried by planning with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxrl.config import Config
from jaxrl.errors import ConfigError
from jaxrl.models import ModelConfig
from jaxrl.planner.analytic import estimated_steps
from jaxrl.planner.memory import Remedy
from jaxrl.planner.run_shapes import shapes_of
from jaxrl.sharding import mesh_sizes

__all__ = ["find_remedies"]


def find_remedies(
    config: Config,
    model: ModelConfig,
    devices: int,
    platform: str | None,
    limit: int,
    scale: float = 1.0,
) -> tuple[Remedy, ...]:
    """Changes that each make the plan fit, cheapest first; or else what they come to together.

    Args:
        config: A run that does not fit.
        model: Its model's shape.
        devices: How many there are.
        platform: Of the devices, for what no compiler counts.
        limit: Bytes of a device.
        scale: What estimates are multiplied with: a compiler's figure over the estimate.
    """

    def tried(changes: dict[str, Any], count: int, cost: str) -> Remedy | None:
        try:
            shapes = shapes_of(_changed(config, changes), model, count)
        except ConfigError:
            return None  # sizes that do not divide
        needed = int(scale * max(s.needed for s in estimated_steps(shapes, platform)))
        more = () if count == devices else (f"{count} devices",)
        words = (*(f"{key}={value}" for key, value in changes.items()), *more)
        return Remedy(words, needed, needed <= limit, cost)

    candidates = list(_candidates(config, devices))
    single = [tried(*candidate) for candidate in candidates]
    fitting = tuple(remedy for remedy in single if remedy and remedy.fits)
    if fitting:
        return fitting
    together: dict[str, Any] = {}
    last: Remedy | None = None
    for changes, count, cost in candidates:
        joined = tried(together | changes, count, f"all of these; the last: {cost}")
        if joined and (last is None or joined.needed < last.needed):
            together, last = together | changes, joined
        if last and last.fits:
            break
    return (last,) if last else ()


def _candidates(config: Config, devices: int) -> Iterator[tuple[dict[str, Any], int, str]]:
    """Changes, devices, and what it costs; cheapest first."""
    chunk = config.logprob.chunk_size
    for size in (1024, 256):
        if chunk is None or size < chunk:
            yield {"logprob.chunk_size": size}, devices, "smaller products at the head"
    if config.model.dtype != "bfloat16":
        yield {"model.dtype": "bfloat16"}, devices, "products in bfloat16"
    sampler = config.rollout
    if sampler.engine == "trainside" and sampler.batch_size > 1:
        half = max(sampler.batch_size // 4, 1)
        yield {"rollout.batch_size": half}, devices, "more batches to sample"
        if sampler.gather_weights:
            slower = "weights fetched in every decoding step"
            yield {"rollout.gather_weights": False}, devices, slower
    for part in (2, 4, 8):
        tokens = config.packing.micro_batch_tokens // part
        yield {"packing.micro_batch_tokens": tokens}, devices, "more and smaller micro-batches"
    if config.model.remat != "full":
        yield {"model.remat": "full"}, devices, "layers computed twice"
    sizes = mesh_sizes(config.mesh, devices)
    if sizes["data"] > 1:
        changes = _mesh(config, sizes, devices, sizes["tensor"])
        yield changes, devices, "weights travel further"
    for tensor in (2, 4, 8):
        if tensor > sizes["tensor"]:
            changes = _mesh(config, sizes, devices, tensor)
            yield changes, devices, "activations travel in every layer"
    for more in (2, 4, 8):
        changes = _mesh(config, sizes, more * devices, sizes["tensor"])
        yield changes, more * devices, f"{more} times the devices"


def _mesh(config: Config, sizes: dict[str, int], devices: int, tensor: int) -> dict[str, int]:
    """Another mesh, with as many rows on each group of devices as now."""
    now, then = sizes["data"] * sizes["fsdp"], max(devices // tensor, 1)
    tokens = config.packing.micro_batch_tokens * then // now
    changes = {"mesh.data": 1, "mesh.fsdp": then, "mesh.tensor": tensor}
    return changes if then == now else changes | {"packing.micro_batch_tokens": tokens}


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """The settings with dotted keys replaced."""
    for key, value in changes.items():
        section, name = key.split(".")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    return config
