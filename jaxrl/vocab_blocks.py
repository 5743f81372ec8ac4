"""The blocked log-probability core: nothing of size [tokens, vocabulary] exists, forward or back.

The forward pass walks over chunks of positions and, inside a chunk, over blocks of the vocabulary,
keeping a running log-sum-exp.  The backward pass makes the same blocks of logits again from the
hidden states and the head, with one saved log-sum-exp (and one entropy) a token:

    x = softcap(hidden @ head + bias) / temperature,   p = softmax(x),   H = −Σ p log p
    ∂ log p[y] / ∂x = onehot(y) − p,                   ∂H / ∂x = −p (log p + H)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["BlockPlan", "block_plan", "blocked_logprobs", "divide", "raw_logits"]

# One block of float32 logits holds at most this many numbers (4 MiB), so that it stays in cache.
_BLOCK_NUMBERS = 1 << 20
_SMALLEST_BLOCK = 128
# exp(-200) is 0 in float32; the bound keeps 0 * log 0 at 0 where a bias bans a token with -inf.
_LOG_ZERO = -200.0


class BlockPlan(NamedTuple):
    """What is static about one evaluation: block sizes, soft cap, and whether entropy is wanted."""

    positions: int
    vocab: int
    softcap: float | None
    entropy: bool


class _Running(NamedTuple):
    """Sums over the vocabulary blocks seen so far, one number a token, all float32."""

    top: jax.Array  # largest logit
    total: jax.Array  # Σ exp(x - top)
    moment: jax.Array  # Σ exp(x - top) (x - top), for the entropy
    target: jax.Array  # logit of the target; NaN until its block comes by


def block_plan(
    rows: int, length: int, vocab: int, *, chunk_size: int, softcap: float | None, entropy: bool
) -> BlockPlan:
    """Choose how many positions (of all rows) and how many vocabulary columns make one block."""
    positions = max(1, min(chunk_size, length))
    wanted = max(_SMALLEST_BLOCK, _BLOCK_NUMBERS // max(1, rows * positions))
    return BlockPlan(positions, min(wanted, vocab), softcap, entropy)


def raw_logits(
    hidden: jax.Array, head: jax.Array, bias: jax.Array | None, softcap: float | None
) -> jax.Array:
    """Return softcap(hidden @ head + bias) in float32, before the temperature.

    The product takes the wider of the two dtypes and accumulates in float32.
    """
    dtype = jnp.promote_types(hidden.dtype, head.dtype)
    logits = jnp.matmul(
        hidden.astype(dtype), head.astype(dtype), preferred_element_type=jnp.float32
    )
    if bias is not None:
        logits = logits + jnp.expand_dims(bias.astype(jnp.float32), range(logits.ndim - 1))
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def divide(x: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divide x [..., T, V] by a temperature that is a scalar or [..., T]."""
    return x / (temperature[..., None] if temperature.ndim else temperature)


def _fold(body: Callable[[Any, Any, int], Any], carry: Any, size: int, block: int) -> Any:
    """Run `body(carry, start, width)` over [0, size) in equal blocks, the ragged one last."""
    full = size // block
    if full == 1:
        carry = body(carry, 0, block)
    elif full:
        carry = lax.fori_loop(0, full, lambda i, c: body(c, i * block, block), carry)
    if size % block:
        carry = body(carry, full * block, size % block)
    return carry


def _cut(x: jax.Array | None, start: Any, width: int, axis: int) -> Any:
    """Slice [start, start + width) of an axis; what is absent or broadcast along it stays."""
    if x is None or x.ndim == 0:
        return x
    return lax.dynamic_slice_in_dim(x, start, width, axis)


def _add(total: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    """Add `part` into `total` from `start` on, in place under jit."""
    old = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, axis)


def _put(total: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(total, part.astype(total.dtype), start, axis)


class _Tokens(NamedTuple):
    """The arguments that have a position axis (axis 1): hidden [R, T, D], the others [R, T]."""

    hidden: jax.Array
    targets: jax.Array
    mask: jax.Array | None
    temperature: jax.Array  # or a scalar

    def cut(self, start: Any, width: int) -> _Tokens:
        """The tokens of one chunk, with masked hidden rows set to zero."""
        hidden, targets, mask, temperature = (_cut(x, start, width, 1) for x in self)
        if mask is not None:
            hidden = jnp.where(mask[..., None], hidden, 0)
        return _Tokens(hidden, targets, mask, temperature)


def _absorb(run: _Running, x: jax.Array, targets: jax.Array, start: Any, entropy: bool) -> _Running:
    """Take one block of logits x [..., width] into the running sums."""
    top = jnp.maximum(run.top, x.max(-1))
    shrink = jnp.exp(run.top - top)
    below = jnp.maximum(x - top[..., None], _LOG_ZERO)
    weight = jnp.exp(below)
    total = run.total * shrink + weight.sum(-1)
    moment = run.moment
    if entropy:
        moment = (moment + run.total * (run.top - top)) * shrink + (weight * below).sum(-1)
    column = targets - start
    here = (column >= 0) & (column < x.shape[-1])
    index = jnp.where(here, column, 0)[..., None]
    picked = jnp.take_along_axis(x, index, axis=-1)[..., 0]
    return _Running(top, total, moment, jnp.where(here, picked, run.target))


def _forward_chunk(
    plan: BlockPlan, tokens: _Tokens, head: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities, entropies and log-sum-exps [R, C] of one chunk of positions."""

    def block(run: _Running, start: Any, width: int) -> _Running:
        weight, shift = _cut(head, start, width, 1), _cut(bias, start, width, 0)
        x = divide(raw_logits(tokens.hidden, weight, shift, plan.softcap), tokens.temperature)
        return _absorb(run, x, tokens.targets, start, plan.entropy)

    zero = jnp.zeros(tokens.targets.shape, jnp.float32)
    # Finite, not -inf: a first block that is banned altogether would otherwise give inf - inf.
    start = _Running(zero + jnp.finfo(jnp.float32).min, zero, zero, zero + jnp.nan)
    run = _fold(block, start, head.shape[1], plan.vocab)
    log_total = jnp.log(run.total)
    entropy = jnp.maximum(log_total - run.moment / run.total, 0.0) if plan.entropy else zero
    return (run.target - run.top) - log_total, entropy, run.top + log_total


def _forward(
    plan: BlockPlan, tokens: _Tokens, head: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`_forward_chunk` over all positions: lax.map over the full chunks, then the ragged one."""
    rows, length = tokens.targets.shape
    size = plan.positions
    full = length // size
    parts = []
    if full > 1:
        stacked = lax.map(
            lambda i: _forward_chunk(plan, tokens.cut(i * size, size), head, bias),
            jnp.arange(full),
        )
        parts.append(tuple(jnp.moveaxis(x, 0, 1).reshape(rows, full * size) for x in stacked))
    elif full:
        parts.append(_forward_chunk(plan, tokens.cut(0, size), head, bias))
    if length % size:
        parts.append(_forward_chunk(plan, tokens.cut(full * size, length % size), head, bias))
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_logprobs(
    plan: BlockPlan,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    temperature: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [R, T] of targets [R, T], for hidden [R, T, D], head [D, V].

    A target outside [0, V) gives NaN.  Masked hidden rows are read as zero.  The entropy is 0
    where the plan does not ask for it.  Differentiable once, in reverse mode, with respect to
    hidden, head, bias and temperature.
    """
    logprobs, entropy, _ = _forward(plan, _Tokens(hidden, targets, mask, temperature), head, bias)
    return logprobs, entropy


def _fwd(
    plan: BlockPlan, hidden: Any, head: Any, bias: Any, temperature: Any, targets: Any, mask: Any
) -> tuple[Any, Any]:
    tokens = _Tokens(hidden, targets, mask, temperature)
    logprobs, entropy, lse = _forward(plan, tokens, head, bias)
    return (logprobs, entropy), (tokens, head, bias, lse, entropy)


def _slope(
    plan: BlockPlan,
    x: jax.Array,
    start: Any,
    tokens: _Tokens,
    lse: Any,
    entropy: Any,
    g_logprob: Any,
    g_entropy: Any,
) -> jax.Array:
    """∂loss/∂x for one block of scaled logits x [R, C, width]."""
    logp = jnp.maximum(x - lse[..., None], _LOG_ZERO)
    pull = g_logprob[..., None]
    if plan.entropy:
        pull = pull + g_entropy[..., None] * (logp + entropy[..., None])
    hit = start + lax.broadcasted_iota(jnp.int32, x.shape, 2) == tokens.targets[..., None]
    return jnp.where(hit, g_logprob[..., None], 0.0) - jnp.exp(logp) * pull


def _bwd(plan: BlockPlan, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """Vocabulary blocks outside, chunks of positions inside.

    So one [D, width] block of the head's gradient is summed over all positions in float32 and
    written once in the head's dtype, without a float32 copy of the whole head.
    """
    tokens, head, bias, lse, entropy = saved
    g_logprob, g_entropy = cotangents
    length = tokens.targets.shape[1]
    dtype = jnp.promote_types(tokens.hidden.dtype, head.dtype)
    narrow = dtype if dtype == jnp.bfloat16 else jnp.float32
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def over_vocab(grads: Any, start: Any, width: int) -> Any:
        weight, shift = _cut(head, start, width, 1), _cut(bias, start, width, 0)

        def over_positions(carry: Any, at: Any, size: int) -> Any:
            d_hidden, d_weight, d_shift, d_temperature = carry
            part = tokens.cut(at, size)
            here = [_cut(x, at, size, 1) for x in (lse, entropy, g_logprob, g_entropy)]
            raw = raw_logits(part.hidden, weight, shift, plan.softcap)
            x = divide(raw, part.temperature)
            d_x = _slope(plan, x, start, part, *here)
            d_temperature = _add(d_temperature, -(d_x * x).sum(-1), at, 1)
            d_raw = divide(d_x, part.temperature)
            if plan.softcap is not None:
                d_raw = d_raw * (1 - jnp.square(raw / plan.softcap))
            d_dot = d_raw.astype(narrow)
            d_hidden = _add(d_hidden, dot("rtv,dv->rtd", d_dot, weight.astype(narrow)), at, 1)
            d_weight = d_weight + dot("rtd,rtv->dv", part.hidden.astype(narrow), d_dot)
            if d_shift is not None:
                d_shift = d_shift + d_raw.sum((0, 1))
            return d_hidden, d_weight, d_shift, d_temperature

        d_hidden, d_head, d_bias, d_temperature = grads
        zeros = jnp.zeros(weight.shape, jnp.float32)
        d_shift = None if shift is None else jnp.zeros(shift.shape, jnp.float32)
        inner = (d_hidden, zeros, d_shift, d_temperature)
        d_hidden, d_weight, d_shift, d_temperature = _fold(
            over_positions, inner, length, plan.positions
        )
        d_head = _put(d_head, d_weight, start, 1)
        d_bias = None if d_bias is None else _put(d_bias, d_shift, start, 0)
        return d_hidden, d_head, d_bias, d_temperature

    zeros = (
        jnp.zeros(tokens.hidden.shape, jnp.float32),
        jnp.zeros_like(head),
        None if bias is None else jnp.zeros_like(bias),
        jnp.zeros(tokens.targets.shape, jnp.float32),
    )
    d_hidden, d_head, d_bias, d_temperature = _fold(over_vocab, zeros, head.shape[1], plan.vocab)
    d_temperature = d_temperature / tokens.temperature
    if tokens.temperature.ndim == 0:
        d_temperature = d_temperature.sum()
    return d_hidden.astype(tokens.hidden.dtype), d_head, d_bias, d_temperature, None, None


blocked_logprobs.defvjp(_fwd, _bwd)
