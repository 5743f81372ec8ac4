"""From per-token values to one number: masked means, whitening, loss aggregation, metric sums.

Every reduction here counts valid positions only, works in float32, and gives 0 where nothing is
valid. Values at masked positions are replaced before any arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxrl.checks import (
    ArrayInput,
    choice,
    floats,
    mask_of,
    scalar,
    segments_of,
    time_axis,
    whole_number,
)
from jaxrl.segments import last_of_each_segment, segment_totals

__all__ = ["Weighted", "aggregate", "masked_mean", "sum_finite", "whiten"]

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def masked_mean(
    x: ArrayInput, mask: ArrayInput, *, axis: int | tuple[int, ...] | None = None
) -> Float32[Array, "*shape"]:
    """Mean over the valid positions.

        Σ mask · x / Σ mask

    Args:
        x: values in any unit, [...].
        mask: bool or integer 0/1 of exactly the shape of x; which positions are valid.
        axis: axes to reduce; None reduces all.

    Returns:
        float32, x's shape without the reduced axes, in the unit of x; 0 where nothing is valid.

    Masked positions: ignored, NaN and inf included; their gradient is exactly 0.

    Raises:
        ValueError: mask has another shape, an integer mask holds other values, no such axis.
        TypeError: mask is neither bool nor integer.

    Source: the definition of a weighted mean with weights 0 and 1.

    >>> x = jnp.array([1.0, 3.0, jnp.nan])
    >>> print(masked_mean(x, jnp.array([True, True, False])))
    2.0
    """
    x = floats("x", x)
    mask = mask_of("mask", mask, x.shape, "x")
    return _mean(jnp.where(mask, x, 0.0), mask, axis)


def whiten(
    x: ArrayInput,
    mask: ArrayInput,
    *,
    shift_mean: bool = True,
    ddof: int = 0,
    eps: ArrayInput = 1e-8,
) -> Float32[Array, "*shape"]:
    """Scale to zero mean and unit variance over all valid cells together.

        y = (x − m) / √(s² + ε),   m = Σ x / n,   s² = Σ (x − m)² / (n − ddof)

    Args:
        x: values, e.g. advantages in reward units, [...]. All axes share one m and one s².
        mask: bool or integer 0/1 of exactly the shape of x; n is the number of valid cells.
        shift_mean: False adds m back, so that only the scale changes.
        ddof: 0 for the population variance, 1 for Bessel's correction.
        eps: ε, added to the variance, in squared units of x.

    Returns:
        float32 of x's shape, without unit (with shift_mean False, m plus a number without unit).
        n ≤ ddof gives s² = 0; a single valid cell, or equal ones, therefore give 0 (or m).

    Masked positions: ignored, NaN and inf included; outputs and gradients there are exactly 0.

    Raises:
        ValueError: mask has another shape or other values than 0/1, eps < 0, ddof < 0.
        TypeError: mask is neither bool nor integer, ddof is not an integer.

    Source: advantage normalisation, Andrychowicz et al. 2021, "What Matters In On-Policy
    Reinforcement Learning?", choice C67.

    >>> x = jnp.array([1.0, 3.0, 99.0])
    >>> print(whiten(x, jnp.array([True, True, False])))
    [-1.  1.  0.]
    """
    x = floats("x", x)
    mask = mask_of("mask", mask, x.shape, "x")
    ddof = whole_number("ddof", ddof, minimum=0)
    mean, centred = centre(x, mask)
    spread = variance(centred, mask, ddof=ddof) + scalar("eps", eps, minimum=0.0)
    scaled = centred * lax.rsqrt(jnp.where(spread == 0.0, 1.0, spread))
    return scaled if shift_mean else jnp.where(mask, scaled + mean, 0.0)


def aggregate(
    per_token: ArrayInput,
    mask: ArrayInput,
    *,
    mode: Mode,
    segment_ids: ArrayInput | None = None,
    horizon: ArrayInput | None = None,
    denominator: ArrayInput | None = None,
) -> Float32[Array, ""]:
    """Reduce per-token losses to the scalar that is differentiated.

        token-mean               Σᵢ Σₜ xᵢₜ / number of valid tokens
        seq-mean-token-mean      Σᵢ (Σₜ xᵢₜ / nᵢ) / number of sequences
        seq-mean-token-sum       Σᵢ Σₜ xᵢₜ / number of sequences
        seq-mean-token-sum-norm  Σᵢ Σₜ xᵢₜ / horizon

    A sequence i is a row, or a segment of a row; sequences without a valid token do not count.
    Parts of a batch that all get the batch's own count as `denominator` add up to the loss of
    the whole, and so do their gradients.

    Args:
        per_token: losses, [..., T].
        mask: bool or integer 0/1, [..., T]; which tokens are valid.
        mode: one of the four above.
        segment_ids: integers [..., T]; a sequence is a maximal run of equal ids. None: a row.
        horizon: constant > 0 in tokens, read (and required) by seq-mean-token-sum-norm alone.
        denominator: the count of the whole batch: tokens for token-mean, sequences with a valid
            token for seq-mean-token-mean and -sum; not read by seq-mean-token-sum-norm, which
            divides by no count. None counts here; 0 gives 0.

    Returns:
        float32 scalar in the unit of per_token; 0 where nothing is valid.

    Masked positions: ignored, NaN and inf included; their gradient is exactly 0.

    Raises:
        ValueError: shapes differ, unknown mode, horizon missing or ≤ 0, denominator < 0.
        TypeError: mask is neither bool nor integer, segment_ids are not integers.

    Source: token-mean: Yu et al. 2025, "DAPO", equation 8; seq-mean-token-mean: Shao et al. 2024,
    "DeepSeekMath", equation 3; seq-mean-token-sum-norm: Liu et al. 2025, "Understanding
    R1-Zero-Like Training", section 3.2.

    >>> loss, mask = jnp.array([[4.0, 0.0], [1.0, 3.0]]), jnp.array([[True, False], [True, True]])
    >>> print(aggregate(loss, mask, mode="seq-mean-token-mean"))
    3.0
    """
    choice("mode", mode, MODES)
    x = floats("per_token", per_token)
    time_axis("per_token", x.shape)
    mask = mask_of("mask", mask, x.shape, "per_token")
    ids = segments_of(segment_ids, x.shape, "per_token")
    count = None if denominator is None else scalar("denominator", denominator, minimum=0.0)
    x = jnp.where(mask, x, 0.0)
    if mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError(f"horizon is missing; mode={mode!r} divides by a number of tokens > 0")
        return x.sum() / scalar("horizon", horizon, above=0.0)
    if mode == "token-mean":
        return _divide(x.sum(), mask.sum() if count is None else count)
    if mode == "seq-mean-token-mean":
        x = _divide(x, segment_totals(mask.astype(jnp.int32), ids))
    return _divide(x.sum(), last_of_each_segment(mask, ids).sum() if count is None else count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A sum and the weight it stands for; parts are added, and divided once at the end.

    Added over micro-batches, devices and epochs it gives the mean over all tokens, which a mean of
    means does not.

    >>> print((Weighted(5.0, 5.0) + Weighted(7.0, 1.0)).mean())
    2.0
    """

    total: ArrayInput
    """Sum of the weighted values."""
    weight: ArrayInput
    """Sum of the weights, e.g. a number of tokens."""

    @classmethod
    def of(cls, x: ArrayInput, mask: ArrayInput) -> Weighted:
        """Sum and count of the valid positions of `x`."""
        x = floats("x", x)
        mask = mask_of("mask", mask, x.shape, "x")
        return cls(jnp.where(mask, x, 0.0).sum(), mask.sum().astype(jnp.float32))

    def __add__(self, other: Weighted) -> Weighted:
        """Sum of both parts."""
        return Weighted(
            floats("total", self.total) + floats("total", other.total),
            floats("weight", self.weight) + floats("weight", other.weight),
        )

    def mean(self) -> Float32[Array, "*shape"]:
        """Total / weight; 0 where the weight is 0."""
        return _divide(floats("total", self.total), floats("weight", self.weight))


def sum_finite(parts: Iterable[Weighted]) -> tuple[Weighted, Float32[Array, ""]]:
    """Add scalar parts, leaving out those that are not finite, and count the ones left out.

    >>> parts = [Weighted(1.0, 1.0), Weighted(jnp.nan, 1.0), Weighted(3.0, 1.0)]
    >>> whole, invalid = sum_finite(parts)
    >>> print(whole.mean(), invalid)
    2.0 1.0
    """
    whole, invalid = Weighted(0.0, 0.0), jnp.float32(0.0)
    for part in parts:
        total, weight = scalar("total", part.total), scalar("weight", part.weight)
        finite = jnp.isfinite(total) & jnp.isfinite(weight)
        whole += Weighted(jnp.where(finite, total, 0.0), jnp.where(finite, weight, 0.0))
        invalid += 1.0 - finite
    return whole, invalid


def centre(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean over the valid cells, x − mean with 0 at masked cells)."""
    x = jnp.where(mask, x, 0.0)
    rough = _mean(x, mask)
    # The second pass takes out what rounding left in the first, so that equal cells give exactly 0
    # instead of noise that a division by a small deviation would blow up.
    rest = jnp.where(mask, x - rough, 0.0)
    shift = _mean(rest, mask)
    return rough + shift, jnp.where(mask, rest - shift, 0.0)


def variance(centred: jax.Array, mask: jax.Array, *, ddof: int = 0) -> jax.Array:
    """Mean square of centred cells, over n − ddof; 0 if n ≤ ddof."""
    return _divide((centred * centred).sum(), jnp.maximum(mask.sum() - ddof, 0))


def _mean(x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    return _divide(x.sum(axis), mask.sum(axis))


def _divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Total / weight, and 0 with gradient 0 where the weight is 0."""
    empty = weight == 0
    return jnp.where(empty, 0.0, total / jnp.where(empty, 1, weight).astype(jnp.float32))
