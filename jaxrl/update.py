"""The third pure step: one optimizer step over the micro-batches of one update.

Gradients of the losses of all micro-batches (`micro_losses`) are added up, with respect to policy
and value parameters separately, clipped once when complete, and applied only if they are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl.config import AlgorithmConfig
from jaxrl.micro_losses import OWN_COUNTS, Scalars, count_of, counted, make_turns
from jaxrl.optim import Optimizer, steps_taken
from jaxrl.steps import Forward, busy_micros, take_micro
from jaxrl.types import TrainBatch, TrainState

__all__ = ["make_update_step"]


def make_update_step(
    forward: Forward,
    algorithm: AlgorithmConfig,
    policy_optimizer: Optimizer,
    value_optimizer: Optimizer,
    *,
    chunk_size: int | None,
    temperature: float,
    horizon: int,
    warmup_iterations: int = 0,
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, Scalars]]:
    """Build ``update_step(state, batch) -> (state, metrics)`` for a batch [micros, rows, ...].

    A batch without policy tokens leaves parameters and optimizer states as they are. So does a
    non-finite loss or gradient, which is counted in ``state.skipped``. During the first
    `warmup_iterations` only the critic moves.
    """
    turns = make_turns(
        forward, algorithm, chunk_size=chunk_size, temperature=temperature, horizon=horizon
    )

    def update_step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Scalars]:
        valid = batch.packed.policy_valid
        tokens = count_of(valid)
        counts = counted(batch, algorithm.aggregation)
        order, busy = busy_micros(valid)
        grads: list[Any] = []
        sums: Scalars = {}
        maxima: Scalars = {}
        for turn in turns:
            gradient = jax.grad(turn.loss, argnums=turn.argnums, has_aux=True)

            def one(i: jax.Array, gradient: Any = gradient) -> Any:
                micro = take_micro(batch, order[i])
                new, figures = gradient(state.policy_params, state.value_params, micro, counts)
                return (new, figures[0]), figures[1]

            (new, figures), largest = _over(len(valid), busy, one)
            grads += new
            loss = sums.get("loss", 0.0) + figures["loss"]
            sums, maxima = sums | figures | {"loss": loss}, maxima | largest
        policy_grad, value_grad = grads

        policy_norm, value_norm = optax.tree.norm(policy_grad), optax.tree.norm(value_grad)
        finite = jnp.isfinite(sums["loss"] + policy_norm + value_norm)
        apply = finite & (tokens > 0)
        moves = apply & (state.iteration >= warmup_iterations)
        policy_params, policy_opt = _apply(
            policy_optimizer, policy_grad, state.policy_opt, state.policy_params, moves
        )
        value_params, value_opt = _apply(
            value_optimizer, value_grad, state.value_opt, state.value_params, apply
        )
        new_state = TrainState(
            policy_params=policy_params,
            value_params=value_params,
            policy_opt=policy_opt,
            value_opt=value_opt,
            updates=state.updates + 1,
            iteration=state.iteration,
            kl_coef=state.kl_coef,
            reward_moments=state.reward_moments,
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        losses = {name: sums.pop(name) for name in OWN_COUNTS if name in sums}
        means = {name: total / jnp.maximum(tokens, 1.0) for name, total in sums.items()}
        maxima["policy/ratio_min"] = -maxima["policy/ratio_min"]
        rates = {
            "policy/grad_norm": policy_norm,
            "value/grad_norm": value_norm,
            "policy/lr": moves * policy_optimizer.schedule(steps_taken(state.policy_opt)),
            "value/lr": apply * value_optimizer.schedule(steps_taken(state.value_opt)),
        }
        return new_state, losses | means | maxima | rates

    return update_step


def _over(
    most: int, count: jax.Array, one: Callable[[jax.Array], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """The sum of the first and the maximum of the second tree of `one(i)`, for all i < count.

    `count` is at most `most`. Of a single micro-batch nothing is added up: its gradients are the
    totals, and no second copy of them exists. Without a policy token they are zeros.
    """
    if most == 1:
        return one(jnp.int32(0))

    def body(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        added, largest = one(i)
        sums = jax.tree.map(jnp.add, carry[0], added)
        return sums, jax.tree.map(jnp.maximum, carry[1], largest)

    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
    lowest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes[1])
    return lax.fori_loop(0, count, body, (zeros, lowest))


def _apply(
    optimizer: Optimizer, grad: Any, opt: Any, params: Any, on: jax.Array
) -> tuple[Any, Any]:
    """Parameters and optimizer state after the step, or untouched where `on` is False.

    As a loop that is taken once or not at all, and that gives back the updates in place of the
    gradient: XLA then works in the memory of all three, where it would copy them otherwise.
    """

    def step(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        params, opt, grad = carry
        updates, opt = optimizer.update(grad, opt, params)
        return optax.apply_updates(params, updates), opt, updates

    params, opt, _ = lax.fori_loop(0, on.astype(jnp.int32), step, (params, opt, grad))
    return params, opt
