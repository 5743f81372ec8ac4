"""Log-probability and entropy of each token from hidden states, without [tokens, vocab] arrays.

The only way jaxrl computes log-probabilities, so that old, reference and training passes mean the
same thing: the temperature, the soft cap, the bias and the head are arguments of one function.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jaxrl.head_inputs import HeadInputs, TiedHead, prepare
from jaxrl.head_split import HeadSplit, PlacedHead
from jaxrl.vocab_blocks import block_plan, blocked_logprobs

__all__ = ["HeadSplit", "PlacedHead", "TiedHead", "token_logprobs", "token_logprobs_and_entropy"]


def token_logprobs(
    hidden: ArrayLike,
    head: ArrayLike | TiedHead | PlacedHead,
    targets: ArrayLike,
    *,
    chunk_size: int | None = 1024,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    mask: ArrayLike | None = None,
) -> Float32[Array, "*batch time"]:
    """Log-probability of each target token, in nats.

        z = softcap(hidden @ head + bias) / temperature,    softcap(a) = c tanh(a / c)
        logprobs[..., t] = z[..., t, targets[..., t]] − log Σ_v exp z[..., t, v]

    The products accumulate in float32 whatever the input dtype.  Positions are taken in chunks by
    `lax.map`; inside a chunk the vocabulary is taken in blocks with a running log-sum-exp.  The
    backward pass keeps one log-sum-exp a token and makes the blocks of logits again, so neither
    direction holds an array of tokens x vocabulary.  Gradients flow to hidden, head, bias and
    temperature, once, in reverse mode (no second derivatives).

    Args:
        hidden: final hidden states at the positions that predict the targets, [..., T, D].
        head: output projection [D, V], any float dtype.  Where the weights are tied,
            `embedding.T` or, without a copy, `TiedHead(embedding)`. `PlacedHead` says in which
            dtype it is multiplied and how a mesh splits it.
        targets: token ids [..., T], any integer dtype.
        chunk_size: positions a chunk, counted along T, all rows together; None evaluates one
            piece of dense logits with plain autodiff (same numbers, [tokens, V] memory).
        temperature: sampling temperature > 0, a number or an array that broadcasts to targets.
        bias: added to the logits, [V].
        softcap: the final-logit soft cap c > 0; None for no cap.
        mask: bool or integer 0/1 [..., T]; which positions count.  None: all of them.

    Returns:
        Float32 [..., T].  Exactly 0, with gradients exactly 0, at masked positions, whatever
        hidden, targets and temperature hold there.  NaN where a valid target is outside [0, V).

    Raises:
        ValueError: a shape does not fit, or chunk_size, temperature or softcap is out of range.
        TypeError: hidden, head or bias is not float, targets not integer, or mask a float.

    Source: chunked and blocked softmax cross-entropy after Wijmans et al. 2024, "Cut Your Losses
    in Large-Vocabulary Language Models", section 4; running log-sum-exp after Milakov and
    Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.

    >>> hidden, head = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, math.log(3.0)], [5.0, 5.0]])
    >>> print(jnp.exp(token_logprobs(hidden, head, jnp.array([1]))).round(4))
    [0.75]
    """
    return _evaluate(
        hidden, head, targets, chunk_size, temperature, bias, softcap, mask, entropy=False
    )[0]


def token_logprobs_and_entropy(
    hidden: ArrayLike,
    head: ArrayLike | TiedHead | PlacedHead,
    targets: ArrayLike,
    *,
    chunk_size: int | None = 1024,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    mask: ArrayLike | None = None,
) -> tuple[Float32[Array, "*batch time"], Float32[Array, "*batch time"]]:
    """Log-probability of each target and the entropy of its distribution, both in nats.

        p = softmax(z),    entropy[..., t] = −Σ_v p[..., t, v] log p[..., t, v] >= 0

    z as in `token_logprobs`: the entropy is that of the distribution at the given temperature.
    Its gradient ∂H/∂z = −p (log p + H) is exact and needs one more saved number a token.

    Args:
        hidden: as in `token_logprobs`.
        head: as in `token_logprobs`.
        targets: as in `token_logprobs`.
        chunk_size: as in `token_logprobs`.
        temperature: as in `token_logprobs`.
        bias: as in `token_logprobs`; −inf bans a token.
        softcap: as in `token_logprobs`.
        mask: as in `token_logprobs`.

    Returns:
        (logprobs, entropy), float32 [..., T], both exactly 0 at masked positions.

    Raises:
        ValueError: as in `token_logprobs`.
        TypeError: as in `token_logprobs`.

    >>> hidden, head = jnp.array([[2.0]]), jnp.array([[1.0, 0.0]])  # logits [2, 0]
    >>> _, entropy = token_logprobs_and_entropy(hidden, head, jnp.array([0]), temperature=0.5)
    >>> print(entropy.round(4))
    [0.0901]
    """
    return _evaluate(
        hidden, head, targets, chunk_size, temperature, bias, softcap, mask, entropy=True
    )


def _evaluate(
    hidden: Any,
    head: Any,
    targets: Any,
    chunk_size: Any,
    temperature: Any,
    bias: Any,
    softcap: Any,
    mask: Any,
    *,
    entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """Check, evaluate dense or blocked, and set masked positions to exactly 0."""
    whole = isinstance(chunk_size, int | np.integer) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (whole and chunk_size >= 1):
        raise ValueError(
            f"chunk_size is {chunk_size!r}; expected an integer >= 1, or None for one piece"
        )
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap!r}; expected a number > 0, or None for no cap")
    placed = head if isinstance(head, PlacedHead) else PlacedHead(head)
    inputs = prepare(hidden, placed.head, targets, temperature=temperature, bias=bias, mask=mask)
    if placed.split is not None:
        placed.split.check(inputs)
    cap = None if softcap is None else float(softcap)
    rows, length = inputs.targets.shape
    if rows * length == 0:
        results = (jnp.zeros((rows, length), jnp.float32),) * 2
    elif chunk_size is None:
        results = _dense(cap, entropy, placed.dtype, inputs)
    else:
        sizes = {"chunk_size": int(chunk_size), "softcap": cap, "entropy": entropy}
        sizes |= {"dtype": placed.dtype, "split": placed.split, "platform": placed.platform}
        results = blocked_logprobs(block_plan(rows, length, inputs.vocab, **sizes), inputs)
    if inputs.mask is not None:
        results = [jnp.where(inputs.mask, x, 0.0) for x in results]
    logprobs, entropies = (x.reshape(jnp.shape(targets)) for x in results)
    return logprobs, entropies


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _dense(
    softcap: float | None, entropy: bool, dtype: Any, inputs: HeadInputs
) -> tuple[jax.Array, jax.Array]:
    """The plain path of chunk_size None: all logits at once, gradients by autodiff."""
    if dtype is not None:
        inputs = inputs._replace(head=inputs.like_head(inputs.matrix.astype(dtype)))
    inputs = inputs.chunk(0, inputs.targets.shape[1])
    logp = jax.nn.log_softmax(inputs.over_temperature(inputs.raw_logits(softcap)))
    index = jnp.maximum(inputs.targets, 0)[..., None]
    picked = jnp.take_along_axis(logp, index, axis=-1)[..., 0]
    logprobs = jnp.where(inputs.targets >= 0, picked, jnp.nan)
    if not entropy:
        return logprobs, jnp.zeros_like(logprobs)
    return logprobs, jnp.maximum(-(jnp.exp(logp) * logp).sum(-1), 0.0)
