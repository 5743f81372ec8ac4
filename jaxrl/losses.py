"""Policy loss, value loss and KL estimators, all per token; `importance_weights` is in `ratios`.

Nothing is reduced here and no coefficient is applied: `aggregate` in `reduce.py` does the first,
the caller the second.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jaxrl.checks import ArrayInput, choice, floats, mask_of, optional_mask, scalar
from jaxrl.ratios import EXP_LIMIT, difference, exp_ratio, importance_weights
from jaxrl.reduce import centre, variance

__all__ = [
    "PolicyLoss",
    "ValueLoss",
    "explained_variance",
    "importance_weights",
    "kl_estimate",
    "ppo_policy_loss",
    "ppo_value_loss",
]

KINDS = ("k1", "k2", "k3", "abs")


class PolicyLoss(NamedTuple):
    """What `ppo_policy_loss` returns; everything is 0 or False at masked positions."""

    per_token: Float32[Array, "*shape"]
    """The loss of each token, in units of the advantages."""
    ratio: Float32[Array, "*shape"]
    """π / π_old of each token."""
    clipped: Bool[Array, "*shape"]
    """True where the clipped branch is strictly the larger: the policy gets no gradient there."""
    dual_clipped: Bool[Array, "*shape"]
    """True where the dual clip lowered the loss: no gradient there either."""


class ValueLoss(NamedTuple):
    """What `ppo_value_loss` returns; everything is 0 or False at masked positions."""

    per_token: Float32[Array, "*shape"]
    """The loss of each token, in squared reward units."""
    clipped: Bool[Array, "*shape"]
    """True where the clipped branch is strictly the larger: the critic gets no gradient there."""


def ppo_policy_loss(
    logprobs: ArrayInput,
    old_logprobs: ArrayInput,
    advantages: ArrayInput,
    *,
    clip_low: ArrayInput = 0.2,
    clip_high: ArrayInput = 0.2,
    dual_clip: ArrayInput | None = None,
    mask: ArrayInput | None = None,
) -> PolicyLoss:
    """The clipped surrogate of PPO, negated so that it is minimised.

        r = exp(logprobs − old_logprobs)
        L = max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high))
        with dual_clip c, where A < 0:  L = min(L, −A c)

    The log-ratio is clamped to ±20 nats before exp. At r = 1, ∂L/∂logprobs = −A.

    Args:
        logprobs: log-probability of each token under the policy being trained, nats, [...].
        old_logprobs: the same under the policy before the update, nats, [...].
        advantages: A, reward units (or none once whitened), [...].
        clip_low: how far r may fall below 1 and still gain, ≥ 0.
        clip_high: how far r may rise above 1 and still gain, ≥ 0.
        dual_clip: c > 1, bound on the loss of a bad token that became likely. None: no bound.
        mask: bool or integer 0/1, [...]; which tokens are the policy's own. None: all.

    Returns:
        PolicyLoss(per_token, ratio, clipped, dual_clipped), float32 and bool [...].

    Masked positions: no input is read there, NaN and inf included; outputs and gradients are
    exactly 0. Gradients are also exactly 0 where clipped or dual_clipped, and where the log-ratio
    lies beyond ±20.

    Raises:
        ValueError: shapes differ, a clip is negative, dual_clip ≤ 1.
        TypeError: mask is neither bool nor integer.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; dual clip:
    Ye et al. 2020, "Mastering Complex Control in MOBA Games", equation 5; two clips: Yu et al.
    2025, "DAPO", equation 10.

    >>> old, new = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.5, 0.75]))
    >>> print(ppo_policy_loss(new, old, jnp.array([1.0, 1.0])).per_token)
    [-1.  -1.2]
    """
    new = floats("logprobs", logprobs)
    old = floats("old_logprobs", old_logprobs, new.shape, "logprobs")
    advantage = floats("advantages", advantages, new.shape, "logprobs")
    mask = optional_mask(mask, new.shape, "logprobs")
    low = 1.0 - scalar("clip_low", clip_low, minimum=0.0)
    high = 1.0 + scalar("clip_high", clip_high, minimum=0.0)

    advantage = jnp.where(mask, advantage, 0.0)
    ratio = exp_ratio(difference(new, old, mask))
    plain, bounded = -advantage * ratio, -advantage * jnp.clip(ratio, low, high)
    # Written as a choice between branches, so that ties get the whole gradient of the plain one.
    clipped = bounded > plain
    per_token = jnp.where(clipped, bounded, plain)
    dual_clipped = jnp.zeros_like(clipped)
    if dual_clip is not None:
        ceiling = -advantage * scalar("dual_clip", dual_clip, above=1.0)
        dual_clipped = (advantage < 0.0) & (ceiling < per_token)
        per_token = jnp.where(dual_clipped, ceiling, per_token)
    return PolicyLoss(
        jnp.where(mask, per_token, 0.0), jnp.where(mask, ratio, 0.0), clipped, dual_clipped
    )


def ppo_value_loss(
    values: ArrayInput,
    old_values: ArrayInput,
    returns: ArrayInput,
    *,
    clip: ArrayInput | None = 0.2,
    mask: ArrayInput | None = None,
) -> ValueLoss:
    """Squared error of the critic, with its move away from the old values clipped.

        L = ½ max((V − R)², (V_old + clamp(V − V_old, −clip, clip) − R)²)

    Args:
        values: V, what the critic being trained predicts, reward units, [...].
        old_values: V_old, what the critic predicted before the update, reward units, [...].
        returns: R, the targets, reward units, [...].
        clip: largest move that can lower the loss, reward units, ≥ 0. None: ½ (V − R)².
        mask: bool or integer 0/1, [...]; which positions are steps. None: all.

    Returns:
        ValueLoss(per_token, clipped), float32 and bool [...].

    Masked positions: no input is read there, NaN and inf included; outputs and gradients are
    exactly 0. The gradient with respect to values is also exactly 0 where clipped.

    Raises:
        ValueError: shapes differ, clip is negative.
        TypeError: mask is neither bool nor integer.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 9 without
    clip; the clip as in the code published with that paper, described in Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", section 3.

    >>> print(ppo_value_loss(jnp.array([1.0]), jnp.array([0.0]), jnp.array([1.0]), clip=0.5))
    ValueLoss(per_token=Array([0.125], dtype=float32), clipped=Array([ True], dtype=bool))
    """
    new = floats("values", values)
    old = floats("old_values", old_values, new.shape, "values")
    target = floats("returns", returns, new.shape, "values")
    mask = optional_mask(mask, new.shape, "values")
    new, old, target = (jnp.where(mask, x, 0.0) for x in (new, old, target))

    plain = jnp.square(new - target)
    if clip is None:
        return ValueLoss(0.5 * plain, jnp.zeros_like(mask))
    reach = scalar("clip", clip, minimum=0.0)
    # Inside the reach the clipped value is V itself; old + (V − old) would differ by rounding and
    # count as clipped.
    move = new - old
    near = jnp.where(jnp.abs(move) <= reach, new, old + jnp.clip(move, -reach, reach))
    bounded = jnp.square(near - target)
    clipped = bounded > plain
    # A NaN in old_values reaches only the clipped branch, and must not get lost there.
    return ValueLoss(0.5 * jnp.where(clipped | jnp.isnan(bounded), bounded, plain), clipped)


def kl_estimate(
    logprobs: ArrayInput,
    ref_logprobs: ArrayInput,
    *,
    kind: Literal["k1", "k2", "k3", "abs"] = "k1",
    mask: ArrayInput | None = None,
) -> Float32[Array, "*shape"]:
    """Per-token estimates of KL(policy ‖ reference) from tokens the policy sampled.

        d = logprobs − ref_logprobs
        k1 = d        k2 = d² / 2        k3 = exp(−d) − 1 + d        abs = |d|

    k1 and k3 are unbiased as values; k3 ≥ 0 and varies less; k2 is biased but close when d is
    small. Differentiated as a loss with respect to logprobs, on samples of the policy itself, only
    k2 has the gradient of the KL: the expected gradient of k1 is 0, that of k3 is the gradient of
    KL(reference ‖ policy). In the reward, where nothing is differentiated, k1 and k3 are right.

    Args:
        logprobs: log-probability of each token under the policy, nats, [...].
        ref_logprobs: the same under the reference, nats, [...].
        kind: one of the four above.
        mask: bool or integer 0/1, [...]; which tokens count. None: all.

    Returns:
        float32 [...], nats (k2: nats²). The argument of k3's exp is clamped to ±20, where its
        derivative is that of d alone; d itself is never clamped.

    Masked positions: not read, NaN and inf included; outputs and gradients there are exactly 0.

    Raises:
        ValueError: shapes differ, kind is unknown.
        TypeError: mask is neither bool nor integer.

    Source: Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.

    >>> print(kl_estimate(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0]), kind="k2"))
    [0.5 0. ]
    """
    choice("kind", kind, KINDS)
    new = floats("logprobs", logprobs)
    ref = floats("ref_logprobs", ref_logprobs, new.shape, "logprobs")
    mask = optional_mask(mask, new.shape, "logprobs")
    d = difference(new, ref, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * jnp.square(d)
    if kind == "abs":
        return jnp.abs(d)
    return jnp.expm1(jnp.clip(-d, -EXP_LIMIT, EXP_LIMIT)) + d


def explained_variance(
    values: ArrayInput, returns: ArrayInput, mask: ArrayInput
) -> Float32[Array, ""]:
    """How much of the spread of the returns the critic explains.

        EV = 1 − Var(R − V) / Var(R)

    1 for a perfect critic, 0 for a constant one, negative for one worse than a constant. Variances
    are those of the population, over all valid positions together.

    Args:
        values: V, predictions of the critic, reward units, [...].
        returns: R, the targets, reward units, [...].
        mask: bool or integer 0/1, [...]; which positions are steps.

    Returns:
        float32 scalar without unit; 0 where Var(R) ≤ 1e-12, so also where nothing is valid.

    Masked positions: not read, NaN and inf included; gradients there are exactly 0.

    Raises:
        ValueError: shapes differ, or an integer mask holds other values than 0 and 1.
        TypeError: mask is neither bool nor integer.

    Source: the coefficient of determination R² with the mean of the residuals taken out.

    >>> values, returns = jnp.array([0.0, 1.0]), jnp.array([0.0, 2.0])
    >>> print(explained_variance(values, returns, jnp.array([True, True])))
    0.75
    """
    v = floats("values", values)
    r = floats("returns", returns, v.shape, "values")
    mask = mask_of("mask", mask, v.shape, "values")
    v, r = jnp.where(mask, v, 0.0), jnp.where(mask, r, 0.0)
    residual, spread = variance(centre(r - v, mask)[1], mask), variance(centre(r, mask)[1], mask)
    flat = spread <= 1e-12
    return jnp.where(flat, 0.0, 1.0 - residual / jnp.where(flat, 1.0, spread))
