"""All of a run that has a shape: its model, the longest batch, the state, and where they lie.

On real devices, on those that a compiler pretends to have, or on none (an `AbstractMesh`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxrl.config import Config
from jaxrl.errors import ConfigError
from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.packing import Plan, plan
from jaxrl.sharding import mesh_sizes, row_multiple
from jaxrl.state import Optimizers, abstract_state, make_optimizers
from jaxrl.train_steps import abstract_packed, abstract_train_batch, make_model
from jaxrl.types import PackedBatch, TrainBatch, TrainState

__all__ = ["RunShapes", "bytes_a_device", "find_model", "longest_batch", "shapes_of"]


@dataclass(frozen=True)
class RunShapes:
    """A run as shapes and shardings."""

    config: Config
    model: Model
    mesh: Any
    optimizers: Optimizers
    layout: Plan

    @cached_property
    def state(self) -> TrainState:
        """What is trained."""
        return abstract_state(self.config, self.model, self.mesh, self.optimizers)

    @cached_property
    def packed(self) -> PackedBatch:
        """The batch of an iteration."""
        return abstract_packed(self.layout, self.mesh)

    @cached_property
    def train_batch(self) -> TrainBatch:
        """What one update is given."""
        return abstract_train_batch(self.layout, self.mesh)

    @property
    def parameters(self) -> int:
        """Of the policy."""
        return sum(math.prod(weight.full_shape) for weight in weight_table(self.model.config))

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axes."""
        return dict(self.mesh.shape)


def shapes_of(config: Config, model_config: ModelConfig, mesh: Any) -> RunShapes:
    """Work out the shapes on `mesh`, or on as many devices as it says if it is a number.

    Raises:
        ConfigError: Mesh sizes do not cover the devices or do not divide an axis; or no row fits.
    """
    if isinstance(mesh, int):
        sizes = mesh_sizes(config.mesh, mesh)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    model = make_model(config, model_config, mesh)
    layout = longest_batch(config, row_multiple(mesh))
    shapes = RunShapes(config, model, mesh, make_optimizers(config), layout)
    _ = shapes.state  # indivisible sizes show here
    return shapes


def longest_batch(config: Config, multiple: int) -> Plan:
    """The layout when every prompt and every response is as long as it may be.

    Raises:
        ConfigError: When `packing` holds no row of that length on every device.
    """
    count, new = config.trajectories, config.rollout.max_new_tokens
    shared = config.packing.share_prompts
    return plan(
        [config.data.max_prompt_tokens] * count,
        [new] * count,
        [new + (config.algorithm.truncated == "bootstrap")] * count,
        updates=config.algorithm.updates,
        micro_batch_tokens=config.packing.micro_batch_tokens,
        row_lengths=config.packing.row_lengths,
        row_multiple=multiple,
        groups=[i // config.rollout.samples for i in range(count)] if shared else None,
    )


def bytes_a_device(tree: Any) -> int:
    """Exact bytes of what one device holds of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def find_model(config: Config, file: Path | None, table: Path) -> tuple[str, ModelConfig]:
    """Name and shape of the model, from `file`, the model's own folder, or the table.

    Args:
        config: Its `model.path` names a folder, which need not exist.
        file: A Hugging Face config.json to be taken instead.
        table: Folder of such files; one named as the last part of `model.path` is taken.

    Raises:
        ConfigError: None of the three is there, or the file cannot be read.
    """
    name = Path(config.model.path).name
    own, known = Path(config.model.path) / "config.json", table / f"{name}.json"
    path = file or (own if own.exists() else known)
    if file is None and not path.exists():
        names = sorted(p.stem for p in table.glob("*.json"))
        raise ConfigError(
            f"model.path={config.model.path}: neither {own} nor {known} is there; give the shape "
            f"with --model-config FILE, or a path that ends in one of {names}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a model's config.json ({error})") from error
    return (path.stem if file else name), ModelConfig.from_hf(values)
