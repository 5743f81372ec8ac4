"""The third pure step: one optimizer step over the micro-batches of one update.

Every average is over the whole update: its tokens (or sequences) are counted before the loop and
each micro-batch returns ``sum / global count``, so that plain sums of gradients equal the gradient
of the whole, however the batch is cut. The gradient is taken with respect to policy and value
parameters separately (``argnums=(0, 1)``), clipped once when it is complete, and applied only if it
is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses import importance_weights, kl_estimate, ppo_policy_loss, ppo_value_loss
from jaxrl.optim import Optimizer, steps_taken
from jaxrl.reduce import aggregate
from jaxrl.steps import Forward, busy_micros, policy_outputs, take_micro
from jaxrl.types import TrainBatch, TrainState

__all__ = ["make_loss", "make_update_step"]

Scalars = dict[str, jax.Array]


def make_loss(
    forward: Forward,
    algorithm: AlgorithmConfig,
    *,
    chunk_size: int | None,
    temperature: float,
    horizon: int,
) -> Callable[..., tuple[jax.Array, tuple[Scalars, Scalars]]]:
    """Build ``loss(policy_params, value_params, micro, weight) -> (loss, (sums, maxima))``.

    L = policy loss + value_coef * value loss - entropy_coef * H + kl_coef * KL (kl_in=loss), each
    aggregated over the micro-batch and divided by `weight`, the count of the whole update. `sums`
    are to be added over micro-batches and divided by the token count, `maxima` to be maximised.
    """

    def loss(
        policy_params: Any, value_params: Any, micro: TrainBatch, weight: jax.Array
    ) -> tuple[jax.Array, tuple[Scalars, Scalars]]:
        packed = micro.packed
        valid, segments = packed.policy_valid, packed.policy_segments
        logprobs, entropies, values = policy_outputs(
            forward,
            policy_params,
            value_params,
            packed,
            chunk_size=chunk_size,
            temperature=temperature,
        )

        def reduced(per_token: jax.Array) -> jax.Array:
            return aggregate(
                per_token,
                valid,
                mode=algorithm.aggregation,
                segment_ids=segments,
                horizon=horizon,
                denominator=weight,
            )

        policy = ppo_policy_loss(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            mask=valid,
        )
        per_token = policy.per_token
        if algorithm.importance != "off":
            per_token *= importance_weights(
                micro.old_logprobs,
                packed.behaviour_logprobs,
                valid,
                level=algorithm.importance,
                cap=algorithm.importance_cap,
                segment_ids=segments,
            )
        value = ppo_value_loss(
            values, micro.old_values, micro.returns, clip=algorithm.value_clip, mask=valid
        )
        policy_loss, value_loss = reduced(per_token), reduced(value.per_token)
        total = policy_loss - algorithm.entropy_coef * reduced(entropies)
        if forward.values is not None:
            total += algorithm.value_coef * value_loss
        if algorithm.kl_in == "loss":
            kl = kl_estimate(logprobs, micro.ref_logprobs, kind=algorithm.kl_kind, mask=valid)
            total += algorithm.kl_coef * reduced(kl)
        change = lax.stop_gradient(jnp.where(valid, logprobs - micro.old_logprobs, 0.0))
        ratio = lax.stop_gradient(policy.ratio)
        sums = {
            "policy/ratio_mean": jnp.sum(jnp.where(valid, ratio, 0.0)),
            "policy/clip_fraction_up": _count(policy.clipped & (ratio > 1.0) & valid),
            "policy/clip_fraction_down": _count(policy.clipped & (ratio < 1.0) & valid),
            "policy/dual_clip_fraction": _count(policy.dual_clipped & valid),
            "policy/approx_kl_k1": -jnp.sum(change),
            "policy/approx_kl_k3": jnp.sum(
                kl_estimate(micro.old_logprobs, micro.old_logprobs + change, kind="k3", mask=valid)
            ),
            "value/clip_fraction": _count(value.clipped & valid),
        }
        maxima = {
            "policy/ratio_max": jnp.max(jnp.where(valid, ratio, -jnp.inf)),
            "policy/ratio_min": jnp.max(jnp.where(valid, -ratio, -jnp.inf)),  # negated minimum
            "policy/logprob_change_max": jnp.max(jnp.abs(change)),
        }
        losses = {"policy/loss": policy_loss, "value/loss": value_loss}
        return total, (losses | sums, maxima)

    return loss


def _count(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags).astype(jnp.float32)


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
    loss = make_loss(
        forward, algorithm, chunk_size=chunk_size, temperature=temperature, horizon=horizon
    )
    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def update_step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, Scalars]:
        valid = batch.packed.policy_valid
        tokens = _count(valid)
        weight = _global_weight(batch, algorithm.aggregation)
        order, busy = busy_micros(valid)

        def micro(i: jax.Array) -> Any:
            (total, aux), grads = gradient(
                state.policy_params, state.value_params, take_micro(batch, order[i]), weight
            )
            return grads, {"loss": total} | aux[0], aux[1]

        def body(i: jax.Array, carry: Any) -> Any:
            grads, sums, maxima = micro(i)
            added = jax.tree.map(jnp.add, carry[:2], (grads, sums))
            return *added, jax.tree.map(jnp.maximum, carry[2], maxima)

        shapes = jax.eval_shape(micro, jnp.int32(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
        lowest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes[2])
        (policy_grad, value_grad), sums, maxima = lax.fori_loop(0, busy, body, (*zeros, lowest))

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
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        losses = {name: sums.pop(name) for name in ("loss", "policy/loss", "value/loss")}
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


def _global_weight(batch: TrainBatch, aggregation: str) -> jax.Array:
    """What the whole update's sum is divided by: its policy tokens, or its sequences with one."""
    valid, segments = batch.packed.policy_valid, batch.packed.policy_segments
    if not aggregation.startswith("seq-mean") or aggregation.endswith("norm"):
        return jnp.maximum(_count(valid), 1.0)
    before = jnp.pad(segments[..., :-1], [(0, 0)] * (segments.ndim - 1) + [(1, 0)])
    return jnp.maximum(_count(valid & (segments != before)), 1.0)


def _apply(
    optimizer: Optimizer, grad: Any, opt: Any, params: Any, on: jax.Array
) -> tuple[Any, Any]:
    """Parameters and optimizer state after the step, or untouched where `on` is False."""
    updates, new_opt = optimizer.update(grad, opt, params)
    new_params = optax.apply_updates(params, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(on, new, old)

    return jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_opt, opt)
