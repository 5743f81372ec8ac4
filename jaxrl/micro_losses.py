"""The losses of one micro-batch, and what is reported of it.

Every average is over the whole update: its tokens (or sequences) are counted beforehand and each
micro-batch gives ``sum / global count``, so that plain sums of losses, and of their gradients,
equal those of the whole, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.config import AlgorithmConfig
from jaxrl.losses import PolicyLoss, ValueLoss, kl_estimate, ppo_policy_loss, ppo_value_loss
from jaxrl.ratios import difference, exp_ratio, sequence_log_ratio
from jaxrl.reduce import aggregate
from jaxrl.segments import last_of_each_segment
from jaxrl.steps import Forward, policy_outputs, state_values
from jaxrl.types import TrainBatch

__all__ = ["OWN_COUNTS", "Counts", "Scalars", "Turn", "counted", "count_of", "make_turns"]

Scalars = dict[str, jax.Array]

OWN_COUNTS = ("loss", "policy/loss", "value/loss", "kl/loss", "policy/nll")
"""Divided by their own counts; every other sum is over policy tokens."""


class Counts(NamedTuple):
    """What sums over the whole update are divided by, at least 1 each."""

    losses: jax.Array
    """Policy tokens, or sequences with one, as the aggregation asks."""
    positive: jax.Array
    """Policy tokens of good responses."""


class Turn(NamedTuple):
    """One pass over the micro-batches, and the parameters that it gives the gradient of."""

    loss: Callable[..., tuple[jax.Array, tuple[Scalars, Scalars]]]
    """(policy_params, value_params, micro, counts) -> (loss, (sums, maxima)).

    `sums` are to be added over micro-batches and divided by the token count, `maxima` to be
    maximised."""
    argnums: tuple[int, ...]


def make_turns(
    forward: Forward,
    algorithm: AlgorithmConfig,
    *,
    chunk_size: int | None,
    temperature: float,
    horizon: int,
) -> tuple[Turn, ...]:
    """What an update walks its micro-batches for.

    L = policy loss + value_coef * value loss - entropy_coef * H + kl_coef * KL (kl_in=loss)
        + nll_coef * NLL of good responses

    Each is aggregated over the micro-batch and divided by the count of the whole update. Where the
    critic shares the policy's trunk, one turn is taken for all of L. A critic of its own has a turn
    of its own: the same sums, with the gradient of one model in memory at a time beside the totals.
    """
    options: dict[str, Any] = {"chunk_size": chunk_size, "temperature": temperature}

    def policy(logprobs: jax.Array, entropies: jax.Array, micro: TrainBatch, counts: Counts) -> Any:
        policy_loss = _policy_loss(algorithm, logprobs, micro)
        losses = {"policy/loss": reduced(policy_loss.per_token * micro.weights, micro, counts)}
        total = losses["policy/loss"] - algorithm.entropy_coef * reduced(entropies, micro, counts)
        if algorithm.kl_in == "loss":
            losses["kl/loss"] = reduced(_kl(algorithm, logprobs, micro), micro, counts)
            total += algorithm.kl_coef * losses["kl/loss"]
        if algorithm.nll_coef:
            losses["policy/nll"] = aggregate(
                -logprobs, micro.positive, mode="token-mean", denominator=counts.positive
            )
            total += algorithm.nll_coef * losses["policy/nll"]
        sums, maxima = _token_figures(logprobs, policy_loss, micro)
        return total, losses | sums, maxima

    def value(values: jax.Array, micro: TrainBatch, counts: Counts) -> tuple[jax.Array, Scalars]:
        valid = micro.packed.policy_valid
        loss: ValueLoss = ppo_value_loss(
            values, micro.old_values, micro.returns, clip=algorithm.value_clip, mask=valid
        )
        mean = reduced(loss.per_token, micro, counts)
        clipped = count_of(loss.clipped & valid)
        coef = 0.0 if forward.values is None else algorithm.value_coef
        return coef * mean, {"value/loss": mean, "value/clip_fraction": clipped}

    def reduced(per_token: jax.Array, micro: TrainBatch, counts: Counts) -> jax.Array:
        return aggregate(
            per_token,
            micro.packed.policy_valid,
            mode=algorithm.aggregation,
            segment_ids=micro.packed.policy_segments,
            horizon=horizon,
            denominator=counts.losses,
        )

    def whole(policy_params: Any, value_params: Any, micro: TrainBatch, counts: Counts) -> Any:
        outputs = policy_outputs(forward, policy_params, value_params, micro.packed, **options)
        total, sums, maxima = policy(*outputs[:2], micro, counts)
        more, figures = value(outputs[2], micro, counts)
        total += more
        return total, ({"loss": total} | sums | figures, maxima)

    def of_policy(policy_params: Any, value_params: Any, micro: TrainBatch, counts: Counts) -> Any:
        del value_params
        alone = forward._replace(values=None)
        outputs = policy_outputs(alone, policy_params, {}, micro.packed, **options)
        total, sums, maxima = policy(*outputs[:2], micro, counts)
        return total, ({"loss": total} | sums, maxima)

    def of_critic(policy_params: Any, value_params: Any, micro: TrainBatch, counts: Counts) -> Any:
        del policy_params
        total, figures = value(
            state_values(forward, value_params, None, micro.packed), micro, counts
        )
        return total, ({"loss": total} | figures, {})

    if forward.separate:
        return Turn(of_policy, (0,)), Turn(of_critic, (1,))
    return (Turn(whole, (0, 1)),)


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
    logprobs: jax.Array, policy: PolicyLoss, micro: TrainBatch
) -> tuple[Scalars, Scalars]:
    """Sums over the policy tokens, and maxima over them."""
    valid = micro.packed.policy_valid
    change = lax.stop_gradient(jnp.where(valid, logprobs - micro.old_logprobs, 0.0))
    ratio = lax.stop_gradient(policy.ratio)
    sums = {
        "policy/ratio_mean": jnp.sum(jnp.where(valid, ratio, 0.0)),
        "policy/clip_fraction_up": count_of(policy.clipped & (ratio > 1.0) & valid),
        "policy/clip_fraction_down": count_of(policy.clipped & (ratio < 1.0) & valid),
        "policy/dual_clip_fraction": count_of(policy.dual_clipped & valid),
        "policy/approx_kl_k1": -jnp.sum(change),
        "policy/approx_kl_k3": jnp.sum(
            kl_estimate(micro.old_logprobs, micro.old_logprobs + change, kind="k3", mask=valid)
        ),
    }
    maxima = {
        "policy/ratio_max": jnp.max(jnp.where(valid, ratio, -jnp.inf)),
        "policy/ratio_min": jnp.max(jnp.where(valid, -ratio, -jnp.inf)),  # negated minimum
        "policy/logprob_change_max": jnp.max(jnp.abs(change)),
    }
    return sums, maxima


def count_of(flags: jax.Array) -> jax.Array:
    """How many are True, float32."""
    return jnp.sum(flags).astype(jnp.float32)


def counted(batch: TrainBatch, aggregation: str) -> Counts:
    """Counted before the first micro-batch, so that every part is divided by the whole."""
    valid, segments = batch.packed.policy_valid, batch.packed.policy_segments
    chosen = valid
    if aggregation in ("seq-mean-token-mean", "seq-mean-token-sum"):
        chosen = last_of_each_segment(valid, segments)
    return Counts(jnp.maximum(count_of(chosen), 1.0), jnp.maximum(count_of(batch.positive), 1.0))
