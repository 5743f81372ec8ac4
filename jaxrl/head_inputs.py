"""What a log-probability is computed from: checked, flattened to rows, and cut into blocks.

`prepare` turns the arguments of `jaxrl.logprobs` into `HeadInputs`; the dense and the blocked
evaluation both read their logits from there, so there is one definition of a logit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = ["HeadInputs", "TiedHead", "prepare"]

_BANNED = -1e30


class TiedHead(NamedTuple):
    """A head given as the embedding [V, D] it is tied to.

    The same numbers as `embedding.T`, but XLA on CPU would copy the transposed matrix before it
    is read block by block, and copy its gradient back.
    """

    embedding: ArrayLike


class HeadInputs(NamedTuple):
    """Checked arguments with all leading dimensions flattened to rows R."""

    hidden: jax.Array  # [R, T, D]
    head: jax.Array | TiedHead  # [D, V], or [V, D] inside TiedHead
    bias: jax.Array | None  # [V]
    temperature: jax.Array  # float32 [R, T], or a scalar
    targets: jax.Array  # int32 [R, T]; -1 where outside the vocabulary
    mask: jax.Array | None  # bool [R, T]

    @property
    def layout(self) -> str:
        """The axes of `matrix` as einsum letters."""
        return "vd" if isinstance(self.head, TiedHead) else "dv"

    @property
    def matrix(self) -> jax.Array:
        """The head's array as it lies in memory."""
        head = self.head
        return jnp.asarray(head.embedding if isinstance(head, TiedHead) else head)

    @property
    def vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.matrix.shape[self.layout.index("v")]

    def like_head(self, matrix: jax.Array) -> jax.Array | TiedHead:
        """Wrap an array that has the layout of `matrix` as the head is wrapped."""
        return TiedHead(matrix) if isinstance(self.head, TiedHead) else matrix

    def chunk(self, start: ArrayLike, width: int) -> HeadInputs:
        """The positions [start, start + width) of all rows; masked hidden rows become zero."""

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, width, 1)

        hidden = cut(self.hidden)
        mask = None if self.mask is None else cut(self.mask)
        if mask is not None:
            hidden = jnp.where(mask[..., None], hidden, 0)
        temperature = cut(self.temperature) if self.temperature.ndim else self.temperature
        return self._replace(
            hidden=hidden, temperature=temperature, targets=cut(self.targets), mask=mask
        )

    def block(self, start: ArrayLike, width: int) -> HeadInputs:
        """The vocabulary columns [start, start + width); targets keep their numbers."""
        matrix = lax.dynamic_slice_in_dim(self.matrix, start, width, self.layout.index("v"))
        bias = self.bias
        if bias is not None:
            bias = lax.dynamic_slice_in_dim(bias, start, width, 0)
        return self._replace(head=self.like_head(matrix), bias=bias)

    def raw_logits(self, softcap: float | None) -> jax.Array:
        """softcap(hidden @ head + bias), float32 [R, T, V], before the temperature.

        The product takes the wider of the two dtypes and accumulates in float32.
        """
        dtype = jnp.promote_types(self.hidden.dtype, self.matrix.dtype)
        logits = jnp.einsum(
            f"rtd,{self.layout}->rtv",
            self.hidden.astype(dtype),
            self.matrix.astype(dtype),
            preferred_element_type=jnp.float32,
        )
        if self.bias is not None:
            # -inf bans a token; a finite stand-in keeps 0 * log 0 at 0, here and in gradients.
            logits = logits + jnp.maximum(self.bias.astype(jnp.float32), _BANNED)[None, None]
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    def over_temperature(self, x: jax.Array) -> jax.Array:
        """Divide x [R, T, V] by the temperature."""
        return x / (self.temperature[..., None] if self.temperature.ndim else self.temperature)


def prepare(
    hidden: Any, head: Any, targets: Any, *, temperature: Any, bias: Any, mask: Any
) -> HeadInputs:
    """Check the arrays and flatten leading dimensions; see `jaxrl.logprobs.token_logprobs`."""
    hidden = _float_array("hidden", hidden)
    if isinstance(head, TiedHead):
        head = TiedHead(_float_array("head", head.embedding))
    else:
        head = _float_array("head", head)
    bias = None if bias is None else _float_array("bias", bias)
    targets, mask = jnp.asarray(targets), None if mask is None else jnp.asarray(mask)
    inputs = HeadInputs(hidden, head, bias, jnp.asarray(temperature), targets, mask)
    _check_shapes(inputs)
    _check_temperature(temperature, inputs)

    shape, rows = targets.shape, math.prod(targets.shape[:-1])
    flat = (rows, shape[-1])
    mask = None if mask is None else mask.astype(bool)
    temperature = inputs.temperature.astype(jnp.float32)
    if temperature.ndim:
        temperature = jnp.broadcast_to(temperature, shape)
        if mask is not None:
            temperature = jnp.where(mask, temperature, 1.0)
        temperature = temperature.reshape(flat)
    return inputs._replace(
        hidden=hidden.reshape(*flat, hidden.shape[-1]),
        temperature=temperature,
        targets=_clean_targets(targets, inputs.vocab).reshape(flat),
        mask=None if mask is None else mask.reshape(flat),
    )


def _clean_targets(targets: jax.Array, vocab: int) -> jax.Array:
    """Targets as int32, -1 where outside [0, V), before a narrowing cast could wrap them round."""
    if targets.dtype.itemsize < 4:
        targets = targets.astype(jnp.int32)
    inside = (targets >= 0) & (targets < vocab)
    return jnp.where(inside, targets, 0).astype(jnp.int32) - (~inside).astype(jnp.int32)


def _float_array(name: str, x: Any) -> jax.Array:
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {array.dtype}; expected a float dtype")
    return array.astype(jnp.float32) if array.dtype.itemsize > 4 else array


def _fits(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `onto` without changing it."""
    try:
        return np.broadcast_shapes(shape, onto) == onto
    except ValueError:
        return False


def _check_shapes(given: HeadInputs) -> None:
    hidden, matrix, targets, mask = given.hidden, given.matrix, given.targets, given.mask
    if hidden.ndim < 2:
        raise ValueError(f"hidden has shape {hidden.shape}; expected [..., T, D]")
    width, wanted = hidden.shape[-1], given.layout.upper()
    if matrix.ndim != 2 or matrix.shape[given.layout.index("d")] != width or not given.vocab:
        raise ValueError(
            f"head has shape {matrix.shape}; expected [{wanted[0]}, {wanted[1]}] with D={width} "
            "as in hidden and V >= 1"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets has dtype {targets.dtype}; expected an integer dtype")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets has shape {targets.shape}; expected {hidden.shape[:-1]}, the shape of "
            "hidden without its last axis"
        )
    if given.bias is not None and given.bias.shape != (given.vocab,):
        raise ValueError(f"bias has shape {given.bias.shape}; expected ({given.vocab},) = [V]")
    if mask is None:
        return
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask has dtype {mask.dtype}; expected bool, or integer 0/1")
    if mask.shape != targets.shape:
        raise ValueError(f"mask has shape {mask.shape}; expected {targets.shape}, as targets")


def _check_temperature(given: Any, inputs: HeadInputs) -> None:
    """Its shape always; its values where they are known before the program runs."""
    shape = inputs.targets.shape
    if not _fits(inputs.temperature.shape, shape):
        raise ValueError(
            f"temperature has shape {inputs.temperature.shape}; expected a number, or a shape "
            f"that broadcasts to that of targets {shape}"
        )
    masked = inputs.mask is not None and inputs.temperature.ndim > 0
    if any(isinstance(x, Tracer) for x in (given, inputs.mask if masked else None)):
        return
    values = np.asarray(given)
    if masked:
        values = np.broadcast_to(values, shape)[np.asarray(inputs.mask) != 0]
    if not (values > 0).all():
        raise ValueError(f"temperature is {given}; expected > 0 at every valid position")
