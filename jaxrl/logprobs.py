"""Log-probability and entropy of each token from hidden states, without [tokens, vocab] arrays.

The only way jaxrl computes log-probabilities, so that old, reference and training passes mean the
same thing: the temperature, the soft cap, the bias and the head are arguments of one function.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float32

from jaxrl.vocab_blocks import block_plan, blocked_logprobs, divide, raw_logits

__all__ = ["token_logprobs", "token_logprobs_and_entropy"]


def token_logprobs(
    hidden: ArrayLike,
    head: ArrayLike,
    targets: ArrayLike,
    *,
    chunk_size: int | None = 1024,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    mask: ArrayLike | None = None,
) -> Float32[Array, "..."]:
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
        head: output projection [D, V], any float dtype; `embedding.T` where the weights are tied.
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
    head: ArrayLike,
    targets: ArrayLike,
    *,
    chunk_size: int | None = 1024,
    temperature: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    softcap: float | None = None,
    mask: ArrayLike | None = None,
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
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
    """Check, flatten leading dimensions to rows, evaluate dense or blocked, restore and mask."""
    _check_numbers(chunk_size, softcap, temperature, mask)
    hidden, head = _float_array("hidden", hidden), _float_array("head", head)
    bias = None if bias is None else _float_array("bias", bias)
    targets, mask = jnp.asarray(targets), None if mask is None else jnp.asarray(mask)
    temperature = jnp.asarray(temperature, jnp.float32)
    _check_shapes(hidden, head, targets, temperature, bias, mask)

    shape, vocab = targets.shape, head.shape[1]
    rows, length = math.prod(shape[:-1]), shape[-1]
    if mask is not None:
        mask = mask.astype(bool)
    if temperature.ndim:
        temperature = jnp.broadcast_to(temperature, shape)
        if mask is not None:
            temperature = jnp.where(mask, temperature, 1.0)
        temperature = temperature.reshape(rows, length)
    args = (
        hidden.reshape(rows, length, hidden.shape[-1]),
        head,
        bias,
        temperature,
        _clean_targets(targets, vocab).reshape(rows, length),
        None if mask is None else mask.reshape(rows, length),
    )
    cap = None if softcap is None else float(softcap)
    if rows * length == 0:
        results = (jnp.zeros((rows, length), jnp.float32),) * 2
    elif chunk_size is None:
        results = _dense(*args, cap, entropy)
    else:
        plan = block_plan(
            rows, length, vocab, chunk_size=int(chunk_size), softcap=cap, entropy=entropy
        )
        results = blocked_logprobs(plan, *args)
    logprobs, entropies = (x.reshape(shape) for x in results)
    if mask is not None:
        logprobs, entropies = jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropies, 0.0)
    return logprobs, entropies


def _dense(
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    temperature: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    softcap: float | None,
    entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """The plain path of chunk_size None: all logits at once, gradients by autodiff."""
    if mask is not None:
        hidden = jnp.where(mask[..., None], hidden, 0)
    logp = jax.nn.log_softmax(divide(raw_logits(hidden, head, bias, softcap), temperature))
    picked = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    logprobs = jnp.where(targets >= 0, picked, jnp.nan)
    if not entropy:
        return logprobs, jnp.zeros_like(logprobs)
    # Finite, so that a token banned with -inf contributes 0 * log 0 = 0 and no NaN.
    finite = jnp.maximum(logp, jnp.finfo(jnp.float32).min)
    return logprobs, jnp.maximum(-(jnp.exp(logp) * finite).sum(-1), 0.0)


def _clean_targets(targets: jax.Array, vocab: int) -> jax.Array:
    """int32 targets; -1 for those outside [0, V), before a narrowing cast could wrap them round."""
    if targets.dtype.itemsize < 4:
        targets = targets.astype(jnp.int32)
    inside = (targets >= 0) & (targets < vocab)
    return jnp.where(inside, targets, 0).astype(jnp.int32) - (~inside).astype(jnp.int32)


def _float_array(name: str, x: Any) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {array.dtype}; expected a float dtype")
    return array.astype(jnp.float32) if array.dtype.itemsize > 4 else array


def _check_numbers(chunk_size: Any, softcap: Any, temperature: Any, mask: Any) -> None:
    """Ranges of the plain numbers, and of a temperature whose value is known."""
    whole = isinstance(chunk_size, (int, np.integer)) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (whole and chunk_size >= 1):
        raise ValueError(
            f"chunk_size={chunk_size!r}; expected an integer >= 1 (positions), or None for one piece"
        )
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap!r}; expected a number > 0, or None for no cap")
    if isinstance(temperature, jax.core.Tracer):
        return
    values = np.asarray(temperature, np.float64)
    if mask is not None and values.ndim:
        if isinstance(mask, jax.core.Tracer) or not _fits(values.shape, np.shape(mask)):
            return
        values = np.broadcast_to(values, np.shape(mask))[np.asarray(mask) != 0]
    if not (values > 0).all():
        raise ValueError(
            f"temperature={temperature!r}; expected a number > 0 at every valid position"
        )


def _fits(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `onto` without changing it."""
    try:
        return np.broadcast_shapes(shape, onto) == onto
    except ValueError:
        return False


def _check_shapes(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
) -> None:
    if hidden.ndim < 2:
        raise ValueError(f"hidden has shape {hidden.shape}; expected [..., T, D]")
    width = hidden.shape[-1]
    if head.ndim != 2 or head.shape[0] != width or head.shape[1] == 0:
        raise ValueError(
            f"head has shape {head.shape}; expected [D, V] with D={width} as in hidden"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets has dtype {targets.dtype}; expected an integer dtype")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets has shape {targets.shape}; expected {hidden.shape[:-1]}, "
            f"hidden {hidden.shape} without its last axis"
        )
    if not _fits(temperature.shape, targets.shape):
        raise ValueError(
            f"temperature has shape {temperature.shape}; expected a number or a shape that "
            f"broadcasts to targets {targets.shape}"
        )
    if bias is not None and bias.shape != head.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}; expected [V] = {head.shape[1:]}")
    if mask is not None:
        if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
            raise TypeError(f"mask has dtype {mask.dtype}; expected bool, or integer 0/1")
        if mask.shape != targets.shape:
            raise ValueError(
                f"mask has shape {mask.shape}; expected that of targets {targets.shape}"
            )
