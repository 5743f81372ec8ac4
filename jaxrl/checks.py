"""What the maths functions accept: one place for their dtype, shape and range checks.

Shapes and dtypes are known while tracing and are always checked. Values are checked only when they
are known: a number, a NumPy array, or a JAX array outside `jit`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = [
    "ArrayInput",
    "choice",
    "concrete",
    "floats",
    "identifiers",
    "mask_of",
    "optional_mask",
    "scalar",
    "segments_of",
    "time_axis",
    "whole_number",
]

ArrayInput = ArrayLike | Sequence[Any]
"""Arrays, numbers, and nested lists of numbers."""


def floats(name: str, x: Any, like: tuple[int, ...] | None = None, of: str = "") -> jax.Array:
    """`x` as float32, of exactly the shape `like`, which is that of the argument `of`."""
    array = _array(name, x)
    dtype = array.dtype
    number = _is_bool(dtype) or jnp.issubdtype(dtype, jnp.number)
    if not number or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{name} has dtype {dtype}; expected real numbers")
    _check_shape(name, array.shape, like, of)
    return jnp.asarray(array, jnp.float32)


def mask_of(name: str, mask: Any, like: tuple[int, ...] | None = None, of: str = "") -> jax.Array:
    """`mask` as bool, of exactly the shape `like`."""
    array = _array(name, mask)
    dtype = array.dtype
    whole = _is_bool(dtype) or jnp.issubdtype(dtype, jnp.integer)
    if not whole and not _is_empty_list(mask):
        raise TypeError(f"{name} has dtype {dtype}; expected bool, or integer 0/1")
    _check_shape(name, array.shape, like, of)
    known = None if _is_bool(dtype) else concrete(array)
    if known is not None:
        wrong = known[(known != 0) & (known != 1)]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong.flat[0]}; an integer {name} may hold 0 and 1")
    return jnp.asarray(array != 0)


def optional_mask(mask: Any, like: tuple[int, ...], of: str) -> jax.Array:
    """The argument `mask` as bool; None selects everything."""
    return jnp.ones(like, bool) if mask is None else mask_of("mask", mask, like, of)


def identifiers(name: str, ids: Any, like: tuple[int, ...], of: str) -> jax.Array:
    """`ids` as int32, of exactly the shape `like`."""
    array = _array(name, ids)
    if not jnp.issubdtype(array.dtype, jnp.integer) and not _is_empty_list(ids):
        raise TypeError(f"{name} has dtype {array.dtype}; expected an integer dtype")
    _check_shape(name, array.shape, like, of)
    known = concrete(array) if array.dtype.itemsize >= 4 else None
    if known is not None and known.size:
        low, high = int(known.min()), int(known.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{name} lies in [{low}, {high}]; expected ids that fit in int32")
    return jnp.asarray(array, jnp.int32)


def segments_of(ids: Any, like: tuple[int, ...], of: str) -> jax.Array | None:
    """The argument `segment_ids` as int32; None, one segment a row, stays None."""
    return None if ids is None else identifiers("segment_ids", ids, like, of)


def scalar(
    name: str, x: Any, *, minimum: float | None = None, above: float | None = None
) -> jax.Array:
    """`x` as a float32 scalar, at least `minimum` and greater than `above` where it is known."""
    array = floats(name, x)
    if array.ndim:
        raise ValueError(f"{name} has shape {array.shape}; expected a single number, shape ()")
    known = concrete(x)
    if known is not None and minimum is not None and not known >= minimum:
        raise ValueError(f"{name}={known}; expected a number >= {minimum:g}")
    if known is not None and above is not None and not known > above:
        raise ValueError(f"{name}={known}; expected a number > {above:g}")
    return array


def whole_number(name: str, x: Any, *, minimum: int) -> int:
    """`x` as a static int of at least `minimum`."""
    if isinstance(x, bool | Tracer):
        raise TypeError(f"{name}={x!r}; expected a static integer (static_argnames under jit)")
    try:
        number = operator.index(x)
    except TypeError:
        raise TypeError(f"{name}={x!r}; expected an integer") from None
    if number < minimum:
        raise ValueError(f"{name}={number}; expected an integer >= {minimum}")
    return number


def choice(name: str, x: Any, allowed: Sequence[str]) -> None:
    """Refuse `x` unless it is one of `allowed`."""
    if x not in allowed:
        raise ValueError(f"{name}={x!r}; expected one of {', '.join(map(repr, allowed))}")


def time_axis(name: str, shape: tuple[int, ...]) -> None:
    """Refuse an array without a last axis to call time."""
    if not shape:
        raise ValueError(f"{name} has shape (); expected [..., T], time last")


def concrete(x: Any) -> np.ndarray | None:
    """The value of `x` when it is known here and now, else None (traced, or on other hosts)."""
    if isinstance(x, Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def _array(name: str, x: Any) -> jax.Array | np.ndarray:
    """JAX arrays as they are, everything else on the host, where int64 is not yet narrowed."""
    if x is None:
        raise TypeError(f"{name} is None; expected an array")
    if isinstance(x, jax.Array):
        return x
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        return jnp.asarray(x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} is not an array: {error}") from None


def _is_bool(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _is_empty_list(x: Any) -> bool:
    """NumPy reads an empty list as float64, though it holds no float."""
    return isinstance(x, list | tuple) and np.size(x) == 0


def _check_shape(name: str, given: tuple[int, ...], like: tuple[int, ...] | None, of: str) -> None:
    if like is not None and tuple(given) != tuple(like):
        raise ValueError(f"{name} has shape {tuple(given)}; expected {tuple(like)}, that of {of}")
