"""The steps of a run as they are compiled, and the arguments they are compiled for.

The trainer runs these functions and the planner compiles them: what is planned is what trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.advantage_step import make_advantage_step
from jaxrl.config import Config
from jaxrl.critic import make_forward
from jaxrl.models import Model, ModelConfig
from jaxrl.packing import packed_shapes
from jaxrl.planning import Plan
from jaxrl.sharding import batch_sharding, replicated
from jaxrl.state import Optimizers, abstract_state
from jaxrl.steps import make_score_step
from jaxrl.types import PackedBatch, TrainBatch
from jaxrl.update import make_update_step

__all__ = ["Steps", "abstract_packed", "abstract_train_batch", "make_model", "make_steps"]


@dataclass(frozen=True)
class Steps:
    """The compiled stages."""

    score: Callable[..., Any]
    advantage: Callable[..., Any]
    update: Callable[..., Any]

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each shape that a plan has had."""
        return sum(step._cache_size() for step in (self.score, self.advantage, self.update))  # type: ignore[attr-defined]


def make_model(config: Config, model_config: ModelConfig, mesh: Mesh) -> Model:
    """The decoder as the run's settings and devices want it."""
    return Model(
        model_config,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=config.model.attention,
        mesh=mesh,
    )


def make_steps(config: Config, model: Model, mesh: Mesh, optimizers: Optimizers) -> Steps:
    """Score, advantage and update, jitted with the shardings of what they return."""
    critic = config.critic if config.needs_critic else None
    forward = make_forward(model, critic, branches=config.packing.share_prompts)
    shared: dict[str, Any] = {
        "chunk_size": config.logprob.chunk_size,
        "temperature": config.rollout.temperature,
    }
    score = make_score_step(forward, with_reference=config.needs_reference, **shared)
    advantage = make_advantage_step(config.algorithm, num_groups=config.rollout.prompts)
    update = make_update_step(
        forward,
        config.algorithm,
        optimizers.policy,
        optimizers.value,
        horizon=config.rollout.max_new_tokens,
        warmup_iterations=config.critic.warmup_iterations,
        **shared,
    )
    shardings = jax.tree.map(
        lambda leaf: leaf.sharding, abstract_state(config, model, mesh, optimizers)
    )
    rows = batch_sharding(mesh)
    return Steps(
        score=jax.jit(score, out_shardings=rows),
        advantage=jax.jit(advantage, out_shardings=(rows, replicated(mesh))),
        update=jax.jit(update, donate_argnums=0, out_shardings=(shardings, replicated(mesh))),
    )


def abstract_packed(layout: Plan, mesh: Mesh) -> PackedBatch:
    """The batch of an iteration as the score step is given it; allocates nothing."""
    rows = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), packed_shapes(layout)
    )


def abstract_train_batch(layout: Plan, mesh: Mesh) -> TrainBatch:
    """The part of it that one update is given; allocates nothing."""
    rows = batch_sharding(mesh, leading=1)
    packed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=rows), packed_shapes(layout)
    )
    slots = packed.policy_valid
    number = jax.ShapeDtypeStruct(slots.shape, jnp.float32, sharding=rows)
    return TrainBatch(
        packed=packed,
        old_logprobs=number,
        old_values=number,
        ref_logprobs=number,
        advantages=number,
        returns=number,
        weights=number,
        positive=slots,
    )
