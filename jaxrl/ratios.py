"""Ratios of two policies' probabilities of the same tokens: to weigh, to bound, to reject with."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from jaxrl.checks import ArrayInput, choice, floats, mask_of, scalar, segments_of, time_axis
from jaxrl.segments import segment_totals

__all__ = [
    "EXP_LIMIT",
    "difference",
    "exp_ratio",
    "importance_weights",
    "sequence_log_ratio",
    "within_bounds",
]

LEVELS = ("token", "sequence")
BOUND_LEVELS = ("token", "sequence", "geometric")

EXP_LIMIT = 20.0
"""Largest |argument| of an exp of a log-ratio, in nats; e^20 is 5e8."""


def difference(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
    """The difference a − b, selected first: 0 and without gradient at masked positions."""
    return jnp.where(mask, a, 0.0) - jnp.where(mask, b, 0.0)


def exp_ratio(log_ratio: jax.Array) -> jax.Array:
    """Exp of the clamped log-ratio; derivative 0 beyond the clamp."""
    return jnp.exp(jnp.clip(log_ratio, -EXP_LIMIT, EXP_LIMIT))


def sequence_log_ratio(
    logprobs: ArrayInput,
    old_logprobs: ArrayInput,
    mask: ArrayInput,
    *,
    segment_ids: ArrayInput | None = None,
) -> Float32[Array, "*shape"]:
    """The mean log-ratio of a sequence, given to each of its tokens.

        dₜ = (1/n) Σₛ (logprobsₛ − old_logprobsₛ),   s over the n valid tokens of t's row or segment

    Its exp is the geometric mean of the tokens' ratios. ``ppo_policy_loss(d, zeros, ...)`` and
    aggregation "seq-mean-token-mean" make the sequence-level surrogate: every token is clipped or
    none, and the gradient of a sequence is −A exp(d) (1/n) Σₛ ∇logprobsₛ.

    Args:
        logprobs: log-probability of each token under the policy being trained, nats, [..., T].
        old_logprobs: the same under the policy before the update, nats, [..., T].
        mask: bool or integer 0/1, [..., T]; which tokens the policy wrote.
        segment_ids: integers [..., T]; a sequence is a maximal run of equal ids. None: a row.

    Returns:
        float32 [..., T], nats.

    Masked positions: not read, NaN and inf included; outputs and gradients there are exactly 0.

    Raises:
        ValueError: shapes differ.
        TypeError: mask is neither bool nor integer, segment_ids are not integers.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 to 7.

    >>> print(sequence_log_ratio([-1.0, -1.0, 9.0], [-1.5, -2.5, 9.0], [True, True, False]))
    [1. 1. 0.]
    """
    new = floats("logprobs", logprobs)
    time_axis("logprobs", new.shape)
    old = floats("old_logprobs", old_logprobs, new.shape, "logprobs")
    mask = mask_of("mask", mask, new.shape, "logprobs")
    return _sequence_mean(
        difference(new, old, mask), mask, segments_of(segment_ids, new.shape, "logprobs")
    )


def importance_weights(
    logprobs: ArrayInput,
    behaviour_logprobs: ArrayInput,
    mask: ArrayInput,
    *,
    level: Literal["token", "sequence"] = "token",
    cap: ArrayInput | None = None,
    segment_ids: ArrayInput | None = None,
) -> Float32[Array, "*shape"]:
    """Truncated importance weights between what sampled the tokens and what trains on them.

        token     wₜ = min(exp(dₜ), cap),       dₜ = logprobsₜ − behaviour_logprobsₜ
        sequence  wₜ = min(exp(Σₛ dₛ), cap),    s over the valid tokens of t's row or segment

    The argument of exp, the sum included, is clamped to ±20.

    Args:
        logprobs: log-probability of each token under the trainer's policy, nats, [..., T].
        behaviour_logprobs: the same as the sampler reported it, nats, [..., T].
        mask: bool or integer 0/1, [..., T]; which tokens the policy wrote.
        level: one of the two above.
        cap: largest weight, > 0. None: no cap.
        segment_ids: integers [..., T]; a sequence is a maximal run of equal ids. None: a row.
            Read by level "sequence" alone.

    Returns:
        float32 [..., T] without unit. No gradient flows through the weights.

    Masked positions: not read, NaN and inf included; weights there are exactly 0.

    Raises:
        ValueError: shapes differ, level is unknown, cap ≤ 0.
        TypeError: mask is neither bool nor integer, segment_ids are not integers.

    Source: Ionides 2008, "Truncated Importance Sampling", equation 3; between a sampler and a
    trainer: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training".

    >>> new, old = jnp.log(jnp.array([0.5, 0.8])), jnp.log(jnp.array([0.25, 0.2]))
    >>> print(importance_weights(new, old, jnp.array([True, True]), cap=3.0))
    [2. 3.]
    """
    choice("level", level, LEVELS)
    weights, mask = _ratios(logprobs, behaviour_logprobs, mask, level, segment_ids)
    if cap is not None:
        weights = jnp.minimum(weights, scalar("cap", cap, above=0.0))
    return lax.stop_gradient(jnp.where(mask, weights, 0.0))


def within_bounds(
    logprobs: ArrayInput,
    behaviour_logprobs: ArrayInput,
    mask: ArrayInput,
    *,
    low: ArrayInput,
    high: ArrayInput,
    level: Literal["token", "sequence", "geometric"] = "token",
    segment_ids: ArrayInput | None = None,
) -> Bool[Array, "*shape"]:
    """Which tokens are kept when those with a ratio outside [low, high] are rejected.

        token      low ≤ exp(dₜ) ≤ high,            dₜ = logprobsₜ − behaviour_logprobsₜ
        sequence   low ≤ exp(Σₛ dₛ) ≤ high,         s over the n valid tokens of t's row or segment
        geometric  low ≤ exp((1/n) Σₛ dₛ) ≤ high

    The product over a long sequence strays far from 1 however close its tokens' ratios are; the
    geometric mean does not. The argument of exp is clamped to ±20.

    Args:
        logprobs: log-probability of each token under the trainer's policy, nats, [..., T].
        behaviour_logprobs: the same as the sampler reported it, nats, [..., T].
        mask: bool or integer 0/1, [..., T]; which tokens the policy wrote.
        low: smallest ratio that is kept, ≥ 0.
        high: largest ratio that is kept, > 0.
        level: one of the three above.
        segment_ids: integers [..., T]; a sequence is a maximal run of equal ids. None: a row.

    Returns:
        bool [..., T]; a NaN log-probability is not kept.

    Masked positions: not read, NaN and inf included; False there.

    Raises:
        ValueError: shapes differ, level is unknown, low < 0 or high ≤ 0.
        TypeError: mask is neither bool nor integer, segment_ids are not integers.

    Source: token: Zhao et al. 2025, "Small Leak Can Sink a Great Ship" (IcePop); sequence and
    geometric: Liu et al. 2025, "When Speed Kills Stability".

    >>> new, old = jnp.log(jnp.array([0.5, 0.9])), jnp.log(jnp.array([0.5, 0.1]))
    >>> print(within_bounds(new, old, jnp.array([True, True]), low=0.5, high=2.0))
    [ True False]
    """
    choice("level", level, BOUND_LEVELS)
    ratio, mask = _ratios(logprobs, behaviour_logprobs, mask, level, segment_ids)
    least, most = scalar("low", low, minimum=0.0), scalar("high", high, above=0.0)
    return mask & (ratio >= least) & (ratio <= most)


def _ratios(
    logprobs: ArrayInput,
    behaviour_logprobs: ArrayInput,
    mask: ArrayInput,
    level: str,
    segment_ids: ArrayInput | None,
) -> tuple[jax.Array, jax.Array]:
    """The ratio of each token at `level`, and the mask as bool, after the checks they share."""
    new = floats("logprobs", logprobs)
    time_axis("logprobs", new.shape)
    behaviour = floats("behaviour_logprobs", behaviour_logprobs, new.shape, "logprobs")
    valid = mask_of("mask", mask, new.shape, "logprobs")
    ids = segments_of(segment_ids, new.shape, "logprobs")
    d = difference(new, behaviour, valid)
    if level == "sequence":
        d = segment_totals(d, ids)
    elif level == "geometric":
        d = _sequence_mean(d, valid, ids)
    return exp_ratio(d), valid


def _sequence_mean(d: jax.Array, mask: jax.Array, ids: jax.Array | None) -> jax.Array:
    count = segment_totals(mask.astype(jnp.float32), ids)
    return jnp.where(mask, segment_totals(d, ids) / jnp.maximum(count, 1.0), 0.0)
