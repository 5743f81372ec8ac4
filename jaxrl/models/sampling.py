"""Drawing the next token from logits: filters, the draw itself, and its log-probability.

What is reported is the log-probability of what was drawn from: the softmax under the sampling
temperature over the tokens that the filters left. The trainer's own log-probabilities are of the
whole softmax, so filtered samples are off-policy by the mass that was cut off, which is what an
importance weight of the two makes up for.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxrl.types import Sampling

__all__ = ["Draw", "Knobs", "draw", "filter_logits"]

BLOCK = 256
"""Tokens a block of the two-level draw: about the root of a vocabulary, where it is cheapest."""


class Knobs(NamedTuple):
    """Sampling settings as a compiled sampler takes them.

    A setting that is off is None: it is part of the tree's structure, so turning it on compiles a
    program that has it, while changing its value does not compile at all.
    """

    temperature: jax.Array | None = None
    """float32 scalar > 0; None is greedy."""
    top_k: jax.Array | None = None
    """int32 scalar >= 1."""
    top_p: jax.Array | None = None
    """float32 scalar in (0, 1)."""
    min_p: jax.Array | None = None
    """float32 scalar in (0, 1]."""

    @classmethod
    def of(cls, sampling: Sampling) -> Knobs:
        """The knobs of a request; greedy needs no filter, since each keeps the likeliest token."""
        if sampling.temperature == 0:
            return cls()
        return cls(
            temperature=jnp.float32(sampling.temperature),
            top_k=jnp.int32(sampling.top_k) if sampling.top_k > 0 else None,
            top_p=jnp.float32(sampling.top_p) if sampling.top_p < 1 else None,
            min_p=jnp.float32(sampling.min_p) if sampling.min_p > 0 else None,
        )


class Draw(NamedTuple):
    """One token a row, and the log-probability with which it was drawn."""

    tokens: Int[Array, " batch"]
    logprobs: Float[Array, " batch"]


def filter_logits(
    logits: Float[Array, "batch vocab"],
    *,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
) -> Float[Array, "batch vocab"]:
    """Give −inf to the tokens that may not be drawn; the likeliest is always kept.

    In this order, each on what the one before left, renormalised:
    top_k keeps the k largest logits; top_p keeps token i where the mass of the tokens above it is
    Σ_{z_j > z_i} p_j < top_p, the smallest set whose mass reaches top_p; min_p keeps
    p_i ≥ min_p · max_j p_j. Tokens tied with the last one kept are kept too.

    Args:
        logits: float [batch, vocab], already divided by the temperature.
        top_k: whole number of at least 1; None keeps all.
        top_p: in (0, 1]; None keeps all.
        min_p: in [0, 1]; None keeps all.

    Returns:
        [batch, vocab]: the logits, −inf where removed.

    Source: top_k Fan et al. 2018, top_p Holtzman et al. 2020, min_p Nguyen et al. 2024.

    >>> filter_logits(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), top_k=1) > -jnp.inf
    Array([[ True, False, False]], dtype=bool)
    """
    lowest = jnp.full_like(logits[:, :1], -jnp.inf)
    if top_k is not None or top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        if top_k is not None:
            column = jnp.clip(jnp.asarray(top_k) - 1, 0, logits.shape[-1] - 1)
            lowest = jax.lax.dynamic_slice_in_dim(ordered, column, 1, axis=-1)
        if top_p is not None:
            p = jax.nn.softmax(jnp.where(ordered >= lowest, ordered, -jnp.inf), axis=-1)
            inside = (jnp.cumsum(p, axis=-1) - p < top_p) & (ordered >= lowest)
            lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    if min_p is not None:
        peak = jnp.max(logits, axis=-1, keepdims=True)
        lowest = jnp.maximum(lowest, peak + jnp.log(min_p))
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def draw(keys: Key[Array, " batch"], logits: Float[Array, "batch vocab"], knobs: Knobs) -> Draw:
    """Draw one token a row.

    z = filter(logits / T);  token ~ softmax(z);  logprob = z[token] − log Σ_j exp(z_j), in nats.
    Greedy (no temperature) takes the first largest logit and reports its log-probability at T = 1.
    Each row has its own key and reads nothing of the other rows, so what it draws does not depend
    on its company. A row with a NaN or +inf logit reports NaN.

    Args:
        keys: one key a row.
        logits: [batch, vocab]; float32 is computed in.
        knobs: temperature and filters.

    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> draw(keys, jnp.array([[0.0, 9.0]]), Knobs()).tokens.tolist()
    [1]
    """
    # Tokens first, as `Model.logits` makes them: what follows goes along memory, all rows abreast.
    z = logits.astype(jnp.float32).T
    if knobs.temperature is not None:
        z = z / knobs.temperature
    # Shifted once: the normaliser, the draw and the reported value then share their rounding.
    z = z - jnp.max(z, axis=0, keepdims=True)
    if knobs.temperature is not None and any(knob is not None for knob in knobs[1:]):
        z = filter_logits(z.T, top_k=knobs.top_k, top_p=knobs.top_p, min_p=knobs.min_p).T
    masses = jnp.sum(jnp.exp(_blocks(z)), axis=1)
    if knobs.temperature is None:
        tokens = jnp.argmax(z, axis=0).astype(jnp.int32)
    else:
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(keys)
        tokens = _invert(z, masses, uniform.T)
    drawn = jnp.take_along_axis(z, tokens[None], axis=0)[0]
    return Draw(tokens, drawn - jnp.log(jnp.sum(masses, axis=0)))


def _blocks(z: Float[Array, "vocab batch"]) -> Float[Array, "blocks block batch"]:
    vocab, rows = z.shape
    z = jnp.pad(z, ((0, -vocab % BLOCK), (0, 0)), constant_values=-jnp.inf)
    return z.reshape(-1, BLOCK, rows)


def _invert(
    z: Float[Array, "vocab batch"],
    masses: Float[Array, "blocks batch"],
    uniform: Float[Array, "2 batch"],
) -> Int[Array, " batch"]:
    """The token where the cumulative distribution of softmax(z), max z = 0, passes a random number.

    Two levels, first the block (masses: Σ exp z of each) and then the token in it: two random
    numbers and a pass over the row, where a Gumbel draw needs a random number and two logarithms
    for each token of it.
    """
    block = _pick(masses, uniform[0])
    inside = jnp.take_along_axis(_blocks(z), block[None, None], axis=0)[0]
    return block * BLOCK + _pick(jnp.exp(inside), uniform[1])


def _pick(
    weights: Float[Array, "n batch"], uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """An index a row, in proportion to `weights`; never one of weight 0.

    The cumulative sums rise only where a weight is positive, and both counts stop at such a place.
    """
    ends = jnp.cumsum(weights, axis=0)
    total = ends[-1:]
    # The second count holds when rounding brings uniform * total up to the total itself.
    reached = jnp.sum(ends <= uniform[None] * total, axis=0)
    index = jnp.minimum(reached, jnp.sum(ends < total, axis=0))
    return index.astype(jnp.int32)
