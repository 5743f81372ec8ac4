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
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxrl.head_inputs import HeadInputs
from jaxrl.head_split import HeadSplit

__all__ = ["BlockPlan", "block_plan", "blocked_logprobs"]

# A block is about SIDE tokens x SIDE vocabulary columns of float32.  On CPU 1024 was the fastest
# of 256..4096 (4 MiB, about the second-level cache); an accelerator wants larger products.
_SIDE_CPU = 1024
_SIDE_ACCELERATOR = 4096
_SMALLEST_WIDTH = 128


class BlockPlan(NamedTuple):
    """What is static about one evaluation: block sizes, soft cap, and whether entropy is wanted."""

    positions: int
    vocab: int
    softcap: float | None
    entropy: bool
    dtype: Any = None
    """Of the products; None: the wider of hidden's and head's."""
    split: HeadSplit | None = None

    def cast(self, inputs: HeadInputs) -> HeadInputs:
        """The columns at hand in the dtype of the products."""
        matrix = inputs.matrix if self.dtype is None else inputs.matrix.astype(self.dtype)
        return inputs._replace(head=inputs.like_head(matrix))

    def at_use(self, inputs: HeadInputs) -> HeadInputs:
        """The columns at hand as they are multiplied: cast first, so that less travels."""
        inputs = self.cast(inputs)
        return inputs if self.split is None else self.split.gather(inputs)


def block_plan(
    rows: int,
    length: int,
    vocab: int,
    *,
    chunk_size: int,
    softcap: float | None,
    entropy: bool,
    dtype: Any = None,
    split: HeadSplit | None = None,
    platform: str | None = None,
) -> BlockPlan:
    """Choose how many positions (of all rows) and how many vocabulary columns make one block.

    `chunk_size` is the most positions a chunk may have.  Many or long rows make chunks shorter;
    rows too many for even that make the vocabulary blocks narrower. With a split these are the
    rows and columns of one device.
    """
    if split is not None:
        rows, vocab = rows // split.row_shards, vocab // split.vocab_shards
    side = _SIDE_CPU if (platform or jax.default_backend()) == "cpu" else _SIDE_ACCELERATOR
    positions = max(1, min(chunk_size, length, side // rows))
    width = side * side // (rows * positions) // _SMALLEST_WIDTH * _SMALLEST_WIDTH
    width = min(vocab, max(_SMALLEST_WIDTH, width))
    return BlockPlan(positions, width, softcap, entropy, dtype, split)


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


class _Running(NamedTuple):
    """Sums over the vocabulary blocks seen so far, one number a token, all float32."""

    top: jax.Array  # largest logit
    total: jax.Array  # Σ exp(x - top)
    moment: jax.Array  # Σ exp(x - top) (x - top), for the entropy
    target: jax.Array  # logit of the target; NaN until its block comes by


def _absorb(
    run: _Running, x: jax.Array, targets: jax.Array, start: ArrayLike, entropy: bool
) -> _Running:
    """Take one block of logits x [R, C, width] into the running sums."""
    top = jnp.maximum(run.top, x.max(-1))
    shrink = jnp.exp(run.top - top)
    below = x - top[..., None]
    weight = jnp.exp(below)
    total = run.total * shrink + weight.sum(-1)
    moment = run.moment
    if entropy:
        moment = (moment + run.total * (run.top - top)) * shrink + (weight * below).sum(-1)
    column = targets - start
    here = (column >= 0) & (column < x.shape[-1])
    picked = jnp.take_along_axis(x, jnp.where(here, column, 0)[..., None], axis=-1)[..., 0]
    return _Running(top, total, moment, jnp.where(here, picked, run.target))


def _combined(run: _Running, split: HeadSplit) -> _Running:
    """The running sums of all devices' columns."""
    top = split.largest(run.top)
    shrink = jnp.exp(run.top - top)
    mine = ~jnp.isnan(run.target)
    target = split.over_vocab(jnp.where(mine, run.target, 0.0))
    return _Running(
        top=top,
        total=split.over_vocab(run.total * shrink),
        moment=split.over_vocab((run.moment + run.total * (run.top - top)) * shrink),
        target=jnp.where(split.over_vocab(mine.astype(jnp.int32)) > 0, target, jnp.nan),
    )


def _forward_chunk(plan: BlockPlan, inputs: HeadInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities, entropies and log-sum-exps [R, C] of one chunk of positions."""

    def absorb_block(run: _Running, start: ArrayLike, width: int) -> _Running:
        part = plan.cast(inputs.block(start, width))
        x = part.over_temperature(part.raw_logits(plan.softcap))
        return _absorb(run, x, inputs.targets, start, plan.entropy)

    zero = jnp.zeros(inputs.targets.shape, jnp.float32)
    # Finite, not -inf, which would make the empty moment 0 * inf.
    empty = _Running(zero + jnp.finfo(jnp.float32).min, zero, zero, zero + jnp.nan)
    run = _fold(absorb_block, empty, inputs.vocab, plan.vocab)
    if plan.split is not None:
        run = _combined(run, plan.split)
    log_total = jnp.log(run.total)
    entropy = jnp.maximum(log_total - run.moment / run.total, 0.0) if plan.entropy else zero
    return (run.target - run.top) - log_total, entropy, run.top + log_total


def _forward(plan: BlockPlan, inputs: HeadInputs) -> tuple[jax.Array, ...]:
    """`_forward_chunk` over all positions, by each device for its own rows."""
    split = plan.split
    if split is None:
        return _forward_here(plan, inputs)

    def local(inputs: HeadInputs) -> tuple[jax.Array, ...]:
        return _forward_here(plan, split.own_targets(plan.at_use(inputs)))

    return split.run(local, (split.specs(inputs),), PartitionSpec(split.rows))(inputs)


def _forward_here(plan: BlockPlan, inputs: HeadInputs) -> tuple[jax.Array, ...]:
    """lax.map over the full chunks, then the ragged one."""
    rows, length = inputs.targets.shape
    size, full = plan.positions, length // plan.positions
    stacked = lax.map(
        lambda i: _forward_chunk(plan, inputs.chunk(i * size, size)), jnp.arange(full)
    )
    outputs = [jnp.moveaxis(x, 0, 1).reshape(rows, full * size) for x in stacked]
    if length % size:
        tail = _forward_chunk(plan, inputs.chunk(full * size, length % size))
        outputs = [jnp.concatenate(pair, axis=1) for pair in zip(outputs, tail, strict=True)]
    return tuple(outputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan: BlockPlan, inputs: HeadInputs) -> tuple[jax.Array, jax.Array]:
    logprobs, entropies, _ = _forward(plan, inputs)
    return logprobs, entropies


# One compilation when called outside of jit; inside, no trace of this is left.
@partial(jax.jit, static_argnums=0, inline=True)
def blocked_logprobs(plan: BlockPlan, inputs: HeadInputs) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of the targets, float32 [R, T] each.

    A target of -1 gives NaN.  Masked hidden rows are read as zero.  The entropy is 0 where the
    plan does not ask for it.  Differentiable once, in reverse mode, with respect to hidden, head,
    bias and temperature.
    """
    return _evaluate(plan, inputs)


def _save(plan: BlockPlan, inputs: HeadInputs) -> tuple[Any, Any]:
    logprobs, entropy, lse = _forward(plan, inputs)
    return (logprobs, entropy), (inputs, _PerToken(lse, entropy, logprobs, entropy))


class _PerToken(NamedTuple):
    """What the backward pass knows of each token [R, T]: two saved numbers, two cotangents."""

    lse: jax.Array
    entropy: jax.Array
    d_logprob: jax.Array
    d_entropy: jax.Array


class _Grads(NamedTuple):
    """Gradients being summed in float32; `matrix` and `bias` cover what the loop at hand covers."""

    hidden: jax.Array
    matrix: jax.Array
    bias: jax.Array | None
    temperature: jax.Array


def _slope(
    plan: BlockPlan, x: jax.Array, start: ArrayLike, targets: jax.Array, token: _PerToken
) -> jax.Array:
    """Gradient of the loss with respect to one block of scaled logits x [R, C, width]."""
    logp = x - token.lse[..., None]
    pull = token.d_logprob[..., None]
    if plan.entropy:
        pull = pull + token.d_entropy[..., None] * (logp + token.entropy[..., None])
    hit = start + lax.broadcasted_iota(jnp.int32, x.shape, 2) == targets[..., None]
    return jnp.where(hit, token.d_logprob[..., None], 0.0) - jnp.exp(logp) * pull


def _add(total: jax.Array, part: jax.Array, start: ArrayLike) -> jax.Array:
    """Add `part` into the positions of `total` from `start` on, in place under jit."""
    old = lax.dynamic_slice_in_dim(total, start, part.shape[1], 1)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, 1)


def _add_chunk(
    plan: BlockPlan, grads: _Grads, part: HeadInputs, token: _PerToken, start: Any, at: Any
) -> _Grads:
    """Add what one block (chunk `at` of positions, columns from `start`) gives to each gradient."""
    raw = part.raw_logits(plan.softcap)
    x = part.over_temperature(raw)
    d_x = _slope(plan, x, start, part.targets, token)
    d_raw = part.over_temperature(d_x)
    if plan.softcap is not None:
        d_raw = d_raw * (1 - jnp.square(raw / plan.softcap))
    wide = jnp.promote_types(part.hidden.dtype, part.matrix.dtype)
    dtype = wide if wide == jnp.bfloat16 else jnp.float32  # float16 would underflow
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_dot, hidden, matrix = (y.astype(dtype) for y in (d_raw, part.hidden, part.matrix))
    d_heat = -(d_x * x).sum(-1)  # times 1 / temperature, once, at the end
    return _Grads(
        _add(grads.hidden, dot(f"rtv,{part.layout}->rtd", d_dot, matrix), at),
        grads.matrix + dot("rtd,rtv->dv", hidden, d_dot),
        None if grads.bias is None else grads.bias + d_raw.sum((0, 1)),
        _add(grads.temperature, d_heat, at),
    )


def _gradients(plan: BlockPlan, inputs: HeadInputs, token: _PerToken) -> _Grads:
    """Vocabulary blocks outside, chunks of positions inside.

    So the gradient of one block of the head is summed over all positions in float32 and written
    once in the head's dtype, without a float32 copy of the whole head.
    """
    axis, split = inputs.layout.index("v"), plan.split

    def over_vocab(grads: _Grads, start: ArrayLike, width: int) -> _Grads:
        block = plan.at_use(inputs.block(start, width))

        def over_positions(inner: _Grads, at: ArrayLike, size: int) -> _Grads:
            here = _PerToken(*(lax.dynamic_slice_in_dim(x, at, size, 1) for x in token))
            return _add_chunk(plan, inner, block.chunk(at, size), here, start, at)

        bias = None if block.bias is None else jnp.zeros(width, jnp.float32)
        matrix = jnp.zeros((inputs.hidden.shape[-1], width), jnp.float32)
        inner = grads._replace(matrix=matrix, bias=bias)
        inner = _fold(over_positions, inner, inputs.targets.shape[1], plan.positions)

        def put(total: jax.Array, part: jax.Array, along: int) -> jax.Array:
            part = part.astype(total.dtype)
            return lax.dynamic_update_slice_in_dim(total, part, start, along)

        matrix = inner.matrix
        if inputs.layout == "vd":
            # Turned once a block: as the output of the product it would turn every [C, width]. Of
            # one chunk, XLA on CPU would make it that output, and cannot in bfloat16.
            matrix = lax.optimization_barrier(matrix).T
        if split is not None:
            matrix = split.scatter(matrix, 1 - axis)
        bias = None if grads.bias is None else put(grads.bias, inner.bias, 0)
        return inner._replace(matrix=put(grads.matrix, matrix, axis), bias=bias)

    zeros = _Grads(
        jnp.zeros(inputs.hidden.shape, jnp.float32),
        jnp.zeros_like(inputs.matrix),
        None if inputs.bias is None else jnp.zeros_like(inputs.bias),
        jnp.zeros(inputs.targets.shape, jnp.float32),
    )
    return _fold(over_vocab, zeros, inputs.vocab, plan.vocab)


def _split_gradients(
    plan: BlockPlan, split: HeadSplit, inputs: HeadInputs, token: _PerToken
) -> _Grads:
    """`_gradients` by each device for its own rows and columns, and the sums of them."""

    def local(inputs: HeadInputs, token: _PerToken) -> _Grads:
        grads = _gradients(plan, split.own_targets(inputs), token)
        return grads._replace(
            hidden=split.over_vocab(grads.hidden),
            bias=None if grads.bias is None else split.over_rows(grads.bias),
            temperature=split.over_vocab(grads.temperature),
        )

    where, rows = split.specs(inputs), PartitionSpec(split.rows)
    out: Any = _Grads(rows, split.matrix_spec(inputs.layout), where.bias, rows)  # type: ignore[arg-type]
    return split.run(local, (where, rows), out)(inputs, token)


def _backward(plan: BlockPlan, saved: Any, cotangents: Any) -> tuple[HeadInputs]:
    inputs, token = saved
    token = token._replace(d_logprob=cotangents[0], d_entropy=cotangents[1])
    if plan.split is None:
        grads = _gradients(plan, inputs, token)
    else:
        grads = _split_gradients(plan, plan.split, inputs, token)
    d_temperature = grads.temperature / inputs.temperature
    d_inputs = HeadInputs(
        hidden=grads.hidden.astype(inputs.hidden.dtype),
        head=inputs.like_head(grads.matrix),
        bias=grads.bias,
        temperature=d_temperature if inputs.temperature.ndim else d_temperature.sum(),
        targets=None,  # type: ignore[arg-type]
        mask=None,
    )
    return (d_inputs,)


_evaluate.defvjp(_save, _backward)
