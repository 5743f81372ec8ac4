"""The third pure step: one optimizer step over the micro-batches of one update.

Every average is over the whole update: its tokens (or sequences) are counted before the loop and
each micro-batch returns ``sum / global count``, so that plain sums of gradients equal the gradient
of the whole, however the batch is cut. The gradient is taken with respect to policy and value
parameters separately (``argnums=(0, 1)``), clipped once when it is complete, and applied only if it
is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses import PolicyLoss, ValueLoss, kl_estimate, ppo_policy_loss, ppo_value_loss
from jaxrl.optim import Optimizer, steps_taken
from jaxrl.ratios import difference, exp_ratio, sequence_log_ratio
from jaxrl.reduce import aggregate
from jaxrl.segments import last_of_each_segment
from jaxrl.steps import Forward, busy_micros, policy_outputs, take_micro
from jaxrl.types import TrainBatch, TrainState

__all__ = ["Counts", "make_loss", "make_update_step"]

Scalars = dict[str, jax.Array]

_LOSSES = ("loss", "policy/loss", "value/loss", "kl/loss", "policy/nll")
"""Divided by their own counts; every other sum is over policy tokens."""


class Counts(NamedTuple):
    """What sums over the whole update are divided by, at least 1 each."""

    losses: jax.Array
    """Policy tokens, or sequences with one, as the aggregation asks."""
    positive: jax.Array
    """Policy tokens of good responses."""


def make_loss(
    forward: Forward,
    algorithm: AlgorithmConfig,
    *,
    chunk_size: int | None,
    temperature: float,
    horizon: int,
) -> Callable[..., tuple[jax.Array, tuple[Scalars, Scalars]]]:
    """Build ``loss(policy_params, value_params, micro, counts) -> (loss, (sums, maxima))``.

    L = policy loss + value_coef * value loss - entropy_coef * H + kl_coef * KL (kl_in=loss)
        + nll_coef * NLL of good responses

    Each is aggregated over the micro-batch and divided by the count of the whole update. `sums` are
    to be added over micro-batches and divided by the token count, `maxima` to be maximised.
    """

    def loss(
        policy_params: Any, value_params: Any, micro: TrainBatch, counts: Counts
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
                denominator=counts.losses,
            )

        policy = _policy_loss(algorithm, logprobs, micro)
        value = ppo_value_loss(
            values, micro.old_values, micro.returns, clip=algorithm.value_clip, mask=valid
        )
        losses = {
            "policy/loss": reduced(policy.per_token * micro.weights),
            "value/loss": reduced(value.per_token),
        }
        total = losses["policy/loss"] - algorithm.entropy_coef * reduced(entropies)
        if forward.values is not None:
            total += algorithm.value_coef * losses["value/loss"]
        if algorithm.kl_in == "loss":
            losses["kl/loss"] = reduced(_kl(algorithm, logprobs, micro))
            total += algorithm.kl_coef * losses["kl/loss"]
        if algorithm.nll_coef:
            losses["policy/nll"] = aggregate(
                -logprobs, micro.positive, mode="token-mean", denominator=counts.positive
            )
            total += algorithm.nll_coef * losses["policy/nll"]
        sums, maxima = _token_figures(logprobs, policy, value, micro)
        return total, (losses | sums, maxima)

    return loss


def _policy_loss(algorithm: AlgorithmConfig, logprobs: jax.Array, micro: TrainBatch) -> PolicyLoss:
    valid, old = micro.packed.policy_valid, micro.old_logprobs
    if algorithm.ratio_level == "sequence":
        segments = micro.packed.policy_segments
        logprobs = sequence_log_ratio(logprobs, old, valid, segment_ids=segments)
        old = jnp.zeros_like(old)
    return ppo_policy_loss(
        logprobs,
        old,
        micro.advantages,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        mask=valid,
    )


def _kl(algorithm: AlgorithmConfig, logprobs: jax.Array, micro: TrainBatch) -> jax.Array:
    """The penalty of each token; weighted, its gradient is that of the KL, whatever the kind."""
    valid = micro.packed.policy_valid
    kl = kl_estimate(logprobs, micro.ref_logprobs, kind=algorithm.kl_kind, mask=valid)
    if algorithm.kl_weighted:
        kl *= exp_ratio(difference(logprobs, micro.old_logprobs, valid))
    return kl


def _token_figures(
    logprobs: jax.Array, policy: PolicyLoss, value: ValueLoss, micro: TrainBatch
) -> tuple[Scalars, Scalars]:
    """Sums over the policy tokens, and maxima over them."""
    valid = micro.packed.policy_valid
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
    return sums, maxima


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
        counts = _counts(batch, algorithm.aggregation)
        order, busy = busy_micros(valid)

        def micro(i: jax.Array) -> Any:
            (total, aux), grads = gradient(
                state.policy_params, state.value_params, take_micro(batch, order[i]), counts
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
            reward_moments=state.reward_moments,
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        losses = {name: sums.pop(name) for name in _LOSSES if name in sums}
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


def _counts(batch: TrainBatch, aggregation: str) -> Counts:
    """Counted before the first micro-batch, so that every part is divided by the whole."""
    valid, segments = batch.packed.policy_valid, batch.packed.policy_segments
    counted = valid
    if aggregation in ("seq-mean-token-mean", "seq-mean-token-sum"):
        counted = last_of_each_segment(valid, segments)
    return Counts(jnp.maximum(_count(counted), 1.0), jnp.maximum(_count(batch.positive), 1.0))


def _apply(
    optimizer: Optimizer, grad: Any, opt: Any, params: Any, on: jax.Array
) -> tuple[Any, Any]:
    """Parameters and optimizer state after the step, or untouched where `on` is False."""
    updates, new_opt = optimizer.update(grad, opt, params)
    new_params = optax.apply_updates(params, updates)

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(on, new, old)

    return jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_opt, opt)
