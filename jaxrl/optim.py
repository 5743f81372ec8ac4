"""Optimizers and schedules from settings.

A schedule counts optimizer steps, not rollouts and not micro-batches: its horizon is
``iterations * epochs * updates``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.config import OptimizerConfig

__all__ = ["Optimizer", "make_optimizer", "make_schedule", "steps_taken"]


class Optimizer(NamedTuple):
    """An optax transformation, with the schedule it follows beside it for reporting."""

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn
    schedule: Callable[[Any], jax.Array]


def steps_taken(opt_state: Any) -> jax.Array:
    """Optimizer steps behind this state; what its schedule is read at for the next one."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def make_schedule(config: OptimizerConfig, total_steps: int) -> Callable[[Any], jax.Array]:
    """Learning rate at optimizer step t = 0, 1, ..., total_steps - 1.

    Linear warm-up ``lr * (t + 1) / (warmup_steps + 1)``, so that no step is lost to a rate of 0;
    then constant, or a straight line or half a cosine from lr down to ``min_lr_ratio * lr`` at
    total_steps.
    """

    def schedule(step: Any) -> jax.Array:
        t = jnp.asarray(step, jnp.float32)
        span = max(total_steps - config.warmup_steps, 1)
        done = jnp.clip((t - config.warmup_steps) / span, 0.0, 1.0)
        if config.schedule == "linear":
            left = 1.0 - done
        elif config.schedule == "cosine":
            left = 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        else:
            left = jnp.ones_like(done)
        decayed = config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
        warm = jnp.minimum((t + 1.0) / (config.warmup_steps + 1.0), 1.0)
        return config.lr * warm * decayed

    return schedule


def make_optimizer(config: OptimizerConfig, total_steps: int, decayed: Any) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019) after clipping the accumulated gradient's global norm.

    Args:
        config: Settings of this parameter tree.
        total_steps: Horizon of the schedule, in optimizer steps.
        decayed: Tree of bools like the parameters: which of them weight decay applies to.
    """
    schedule = make_schedule(config, total_steps)
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm > 0 else None
    chain = optax.chain(*([clip] if clip else []), adamw)
    return Optimizer(chain.init, chain.update, schedule)
