"""From one score a response to one reward a token, with the KL penalty and its controller."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxrl.checks import (
    ArrayInput,
    choice,
    concrete,
    floats,
    mask_of,
    scalar,
    segments_of,
    time_axis,
)
from jaxrl.segments import last_of_each_segment

__all__ = ["adaptive_kl_coef", "ending_scores", "overlong_penalty", "token_rewards"]

ENDINGS = ("keep", "zero", "soft", "bootstrap", "mask")


def token_rewards(
    scores: ArrayInput,
    mask: ArrayInput,
    *,
    kl: ArrayInput | None = None,
    kl_coef: ArrayInput = 0.0,
    segment_ids: ArrayInput | None = None,
    score_mask: ArrayInput | None = None,
) -> Float32[Array, "*shape"]:
    """Token rewards: the score on the last token of each response, minus a KL penalty on all.

        rₜ = [t is the last True of the carrier in its row or segment] · score − kl_coef · klₜ

    The carrier is score_mask, or mask without one. A response without a carrier token has nowhere
    to put its score, and none is given.

    Args:
        scores: reward units. Without segment_ids one a row, [...]; with them [..., T], read at the
            last carrier token of each segment and nowhere else.
        mask: bool or integer 0/1, [..., T]; which tokens are the policy's own and pay for KL.
        kl: per-token estimate of the KL to the reference, nats, [..., T]. None: no penalty.
        kl_coef: price of a nat in reward units, a number.
        segment_ids: integers [..., T]; a response is a maximal run of equal ids. None: a row.
        score_mask: bool or integer 0/1, [..., T]; which tokens may carry the score, where these are
            not those of mask (say, a response that ends with a token the policy did not write).

    Returns:
        float32 [..., T], reward units.

    Masked positions: kl is not read there, NaN and inf included, and the penalty and its gradient
    are exactly 0; so is the reward, unless score_mask puts the score on one.

    Raises:
        ValueError: shapes differ, kl_coef is not 0 without kl, or an integer mask holds other
            values than 0 and 1.
        TypeError: a mask is neither bool nor integer, or segment_ids are not integers.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback", equation 2; the penalty per token as in Ziegler et al. 2019, "Fine-Tuning Language
    Models from Human Preferences", section 2.2.

    >>> mask = jnp.array([[True, True, False]])
    >>> print(token_rewards(jnp.array([2.0]), mask, kl=jnp.ones((1, 3)), kl_coef=0.5))
    [[-0.5  1.5  0. ]]
    """
    mask = mask_of("mask", mask)
    shape = mask.shape
    time_axis("mask", shape)
    ids = segments_of(segment_ids, shape, "mask")
    if ids is None:
        scores = floats("scores", scores, shape[:-1], "mask without its time axis")[..., None]
    else:
        scores = floats("scores", scores, shape, "mask (segment_ids given)")
    carrier = mask if score_mask is None else mask_of("score_mask", score_mask, shape, "mask")
    rewards = jnp.where(last_of_each_segment(carrier, ids), scores, 0.0)
    coef = scalar("kl_coef", kl_coef)
    if kl is None:
        known = concrete(kl_coef)
        if known is not None and known != 0:
            raise ValueError(f"kl_coef={known} without kl; pass kl [..., T], or kl_coef=0")
        return rewards
    return rewards - coef * jnp.where(mask, floats("kl", kl, shape, "mask"), 0.0)


def adaptive_kl_coef(
    coef: ArrayInput,
    observed_kl: ArrayInput,
    *,
    target: ArrayInput,
    horizon: ArrayInput,
    n: ArrayInput,
) -> Float32[Array, ""]:
    """The next KL coefficient of the proportional controller.

        e = clip(observed / target − 1, −0.2, 0.2)
        coef′ = coef · (1 + e · n / horizon)

    Args:
        coef: the coefficient in use, reward units a nat.
        observed_kl: mean KL of the batch just seen, nats.
        target: the KL to hold, > 0, in the unit of observed_kl.
        horizon: how many samples it takes to act on an error in full, > 0.
        n: samples in the batch just seen, ≥ 0.

    Returns:
        float32 scalar. For a fixed coefficient do not call this. NaN in, NaN out: leave out
        batches whose update was skipped.

    Raises:
        ValueError: target or horizon ≤ 0, n < 0, or an argument is not a single number.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2.

    >>> print(adaptive_kl_coef(0.5, 2.0, target=1.0, horizon=10.0, n=5.0))
    0.55
    """
    relative = scalar("observed_kl", observed_kl) / scalar("target", target, above=0.0)
    error = jnp.clip(relative - 1.0, -0.2, 0.2)
    share = scalar("n", n, minimum=0.0) / scalar("horizon", horizon, above=0.0)
    return scalar("coef", coef) * (1.0 + error * share)


def overlong_penalty(
    lengths: ArrayInput, *, max_length: ArrayInput, buffer: ArrayInput, penalty: ArrayInput = 1.0
) -> Float32[Array, "*shape"]:
    """The price of coming close to the length limit, to be added to the score; never above 0.

        p(n) = -penalty * clip((n - (max_length - buffer)) / buffer, 0, 1)

    Args:
        lengths: n, tokens of each response, [...].
        max_length: the limit, tokens.
        buffer: the last tokens below the limit, over which the price rises evenly, > 0.
        penalty: the price at the limit and beyond, reward units, >= 0.

    Returns:
        float32 [...], reward units.

    Raises:
        ValueError: buffer <= 0, penalty < 0, or an argument is not a single number.

    Source: Yu et al. 2025, "DAPO", equation 13.

    >>> print(overlong_penalty([6, 9, 10, 12], max_length=10, buffer=4))
    [-0.   -0.75 -1.   -1.  ]
    """
    reach = scalar("buffer", buffer, above=0.0)
    over = floats("lengths", lengths) - (scalar("max_length", max_length) - reach)
    return -scalar("penalty", penalty, minimum=0.0) * jnp.clip(over / reach, 0.0, 1.0)


def ending_scores(
    scores: ArrayInput,
    truncated: ArrayInput,
    lengths: ArrayInput,
    *,
    mode: Literal["keep", "zero", "soft", "bootstrap", "mask"] = "keep",
    max_length: ArrayInput = 0,
    buffer: ArrayInput = 0,
    penalty: ArrayInput = 1.0,
    missing_eos_penalty: ArrayInput = 0.0,
) -> Float32[Array, "*shape"]:
    """Scores after the rule for responses that the length limit ended.

        keep, mask       the score
        zero, bootstrap  0 where truncated
        soft             the score + overlong_penalty(length), truncated or not
        all              minus missing_eos_penalty where truncated

    "bootstrap" says that the episode goes on: its score is unknown, and the caller gives `gae` the
    value of the state it was cut at. "mask" leaves it to the caller to take truncated responses
    out.

    Args:
        scores: reward units, [...].
        truncated: bool or integer 0/1, [...]; from the finish reason, never from a width.
        lengths: tokens of each response, [...]; read by "soft" alone.
        mode: one of the five above.
        max_length: the length limit, tokens; read by "soft" alone, like the next two.
        buffer: see `overlong_penalty`.
        penalty: see `overlong_penalty`.
        missing_eos_penalty: price of not having ended, reward units, >= 0.

    Returns:
        float32 [...], reward units.

    Raises:
        ValueError: shapes differ, mode is unknown, a penalty is negative.
        TypeError: truncated is neither bool nor integer.

    Source: zero, and the penalty: Ouyang et al. 2022 and the trainers that followed; soft: Yu et
    al. 2025, "DAPO", section 3.4; bootstrap: Pardo et al. 2018, "Time Limits in Reinforcement
    Learning", section 3.

    >>> print(ending_scores([1.0, 1.0], [False, True], [3, 8], mode="zero"))
    [1. 0.]
    """
    choice("mode", mode, ENDINGS)
    x = floats("scores", scores)
    cut = mask_of("truncated", truncated, x.shape, "scores")
    if mode in ("zero", "bootstrap"):
        x = jnp.where(cut, 0.0, x)
    elif mode == "soft":
        n = floats("lengths", lengths, x.shape, "scores")
        x = x + overlong_penalty(n, max_length=max_length, buffer=buffer, penalty=penalty)
    return x - jnp.where(cut, scalar("missing_eos_penalty", missing_eos_penalty, minimum=0.0), 0.0)
