"""Scores and advantages relative to the other responses to the same prompt."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxrl.checks import (
    ArrayInput,
    choice,
    concrete,
    floats,
    identifiers,
    mask_of,
    optional_mask,
    scalar,
    whole_number,
)

__all__ = ["group_advantages", "whiten_groups"]

SCALES = ("std", "none", "loo")


def group_advantages(
    scores: ArrayInput,
    group_ids: ArrayInput,
    num_groups: int,
    *,
    scale: Literal["std", "none", "loo"] = "std",
    ddof: int = 0,
    eps: ArrayInput = 1e-6,
    mask: ArrayInput | None = None,
) -> Float32[Array, " N"]:
    """Scores relative to the other responses to the same prompt.

        std   Aᵢ = (xᵢ − μ_g) / (σ_g + ε),   σ_g² = Σ_g (x − μ_g)² / (n_g − ddof)
        none  Aᵢ = xᵢ − μ_g
        loo   Aᵢ = xᵢ − mean of the others in g = (xᵢ − μ_g) · n_g / (n_g − 1)

    Args:
        scores: xᵢ, one score a response in reward units, [N].
        group_ids: g, integers [N] in [0, num_groups); in any order.
        num_groups: static number of groups; a group may be empty.
        scale: one of the three above.
        ddof: 0 for the population deviation, 1 for Bessel's correction; read by std alone.
        eps: ε, added to the deviation, reward units; read by std alone.
        mask: bool or integer 0/1, [N]; False drops a score from its group. None keeps all.

    Returns:
        float32 [N]. A group without spread, of one score, or of no more than ddof (std) gives
        exactly 0.

    Masked positions: scores and ids there are not read; outputs and gradients there are exactly 0.

    Raises:
        ValueError: scores is not [N], a shape differs, scale is unknown, num_groups < 1, or a
            valid id lies outside [0, num_groups). While tracing ids cannot be checked: a score
            with such an id gets NaN and no group counts it.
        TypeError: group_ids are not integers, num_groups is traced, mask is a float.

    Source: std: Shao et al. 2024, "DeepSeekMath", section 4.1.2; none: Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3.2; loo: Ahmadian et al. 2024, "Back to
    Basics", equation 8 (RLOO).

    >>> scores, groups = jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1])
    >>> print(group_advantages(scores, groups, 2, scale="none"))
    [-1.  1.  0.]
    """
    choice("scale", scale, SCALES)
    num_groups = whole_number("num_groups", num_groups, minimum=1)
    ddof = whole_number("ddof", ddof, minimum=0)
    epsilon = scalar("eps", eps, minimum=0.0)
    x = floats("scores", scores)
    if x.ndim != 1:
        raise ValueError(f"scores has shape {x.shape}; expected [N], one score a response")
    ids = identifiers("group_ids", group_ids, x.shape, "scores")
    valid = optional_mask(mask, x.shape, "scores")
    _refuse_outside(ids, valid, num_groups)
    inside = (ids >= 0) & (ids < num_groups)
    counted = valid & inside
    ids, x = jnp.where(counted, ids, 0), jnp.where(counted, x, 0.0)

    def total(y: jax.Array) -> jax.Array:
        """Sum over the group's counted scores, given to each score of the group."""
        return jax.ops.segment_sum(jnp.where(counted, y, 0.0), ids, num_groups)[ids]

    n = jnp.maximum(total(jnp.ones_like(x)), 1.0)
    # The second pass takes out what rounding left in the first mean.
    centred = x - total(x) / n
    centred = centred - total(centred) / n
    top = jax.ops.segment_max(jnp.where(counted, x, -jnp.inf), ids, num_groups)[ids]
    # Decided by comparison: rounding in the mean must not turn equal scores into advantages.
    flat = total((x != top).astype(jnp.float32)) == 0.0
    if scale == "std":
        flat = flat | (n <= ddof)
        square = total(centred * centred) / jnp.where(flat, 1.0, n - ddof)
        centred = centred / (jnp.sqrt(jnp.where(flat, 1.0, square)) + epsilon)
    elif scale == "loo":
        centred = centred * n / jnp.where(flat, 1.0, n - 1.0)
    result = jnp.where(flat, 0.0, centred)
    return jnp.where(valid, jnp.where(inside, result, jnp.nan), 0.0)


def whiten_groups(
    x: ArrayInput,
    mask: ArrayInput,
    group_ids: ArrayInput,
    num_groups: int,
    *,
    eps: ArrayInput = 1e-8,
) -> Float32[Array, "*shape"]:
    """`whiten` within each group: mean 0, deviation 1 over the group's valid cells.

        yᵢ = (xᵢ − μ_g) / √(σ_g² + ε),   σ_g² = Σ_g (x − μ_g)² / n_g

    Args:
        x: say advantages, [...].
        mask: bool or integer 0/1, [...]; which cells are valid.
        group_ids: g, integers [...] in [0, num_groups); a cell outside gets 0.
        num_groups: static number of groups; a group may be empty.
        eps: ε, in units of x squared, ≥ 0.

    Returns:
        float32 [...] without unit; exactly 0 for all cells of a group without spread.

    Masked positions: not read, NaN and inf included; outputs and gradients there are exactly 0.

    Raises:
        ValueError: shapes differ, num_groups < 1, eps < 0.
        TypeError: mask is neither bool nor integer, group_ids are not integers.

    Source: as `whiten`; over a prompt's samples as in Hu 2025, "REINFORCE++", section 3.

    >>> x, groups = jnp.array([1.0, 3.0, 7.0]), jnp.array([0, 0, 1])
    >>> print(whiten_groups(x, jnp.array([True, True, True]), groups, 2))
    [-1.  1.  0.]
    """
    x = floats("x", x)
    valid = mask_of("mask", mask, x.shape, "x")
    num_groups = whole_number("num_groups", num_groups, minimum=1)
    ids = identifiers("group_ids", group_ids, x.shape, "x")
    counted = valid & (ids >= 0) & (ids < num_groups)
    ids = jnp.where(counted, ids, 0)

    def mean(y: jax.Array) -> jax.Array:
        """Over the group's valid cells, given to each cell of the group."""
        cells = jnp.where(counted, y, 0.0).ravel()
        total = jax.ops.segment_sum(cells, ids.ravel(), num_groups)
        count = jax.ops.segment_sum(counted.ravel().astype(jnp.float32), ids.ravel(), num_groups)
        return (total / jnp.maximum(count, 1.0))[ids]

    centred = jnp.where(counted, x, 0.0) - mean(x)
    # The second pass takes out what rounding left in the first mean.
    centred = jnp.where(counted, centred - mean(centred), 0.0)
    spread = mean(jnp.square(centred)) + scalar("eps", eps, minimum=0.0)
    return centred * lax.rsqrt(jnp.where(spread == 0.0, 1.0, spread))


def _refuse_outside(ids: jax.Array, valid: jax.Array, num_groups: int) -> None:
    known, counts = concrete(ids), concrete(valid)
    if known is None or counts is None:
        return
    wrong = known[counts & ((known < 0) | (known >= num_groups))]
    if wrong.size:
        raise ValueError(f"group_ids holds {wrong[0]}; expected ids in [0, {num_groups})")
