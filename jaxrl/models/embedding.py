"""The embedding lookup; on a mesh, rows of the table travel and the table itself does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl.sharding import BATCH_AXES, row_multiple

__all__ = ["embed"]

_TABLE, _ROWS = PartitionSpec("tensor", "fsdp"), PartitionSpec(BATCH_AXES)


def embed(
    mesh: Mesh | None,
    weight: Float[Array, "vocab embed"],
    tokens: Int[Array, "batch time"],
    dtype: Any,
    *,
    gathered: bool = False,
) -> Float[Array, "batch time embed"]:
    """weight[tokens] in `dtype`; the gradient is summed in the weight's own dtype.

    On a mesh the table lies in pieces of [vocab / tensor, embed / fsdp]. Each device looks up its
    piece for all rows of its fsdp group and they exchange features for rows, so that what travels
    is as large as the activations. A batch that the mesh does not divide is left to the compiler.
    `gathered`: the pieces are [vocab / tensor, embed], and each device looks up its own rows.
    """
    if mesh is None or mesh.size == 1 or tokens.shape[0] % row_multiple(mesh):
        return weight[tokens].astype(dtype)
    if gathered:
        own = _run(mesh, partial(_own_rows, dtype=dtype), (PartitionSpec("tensor"), _ROWS), _ROWS)
        return own(weight, tokens)
    return _lookup((mesh, jnp.dtype(dtype)), weight, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(static: tuple[Mesh, Any], weight: jax.Array, tokens: jax.Array) -> jax.Array:
    mesh, dtype = static

    def local(piece: jax.Array, tokens: jax.Array) -> jax.Array:
        found = _own_rows(piece, _of_group(tokens), dtype=dtype)
        return lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    return _run(mesh, local, (_TABLE, _ROWS), _ROWS)(weight, tokens)


def _save(static: tuple[Mesh, Any], weight: jax.Array, tokens: jax.Array) -> tuple[Any, Any]:
    return _lookup(static, weight, tokens), (weight, tokens)


def _gradient(static: tuple[Mesh, Any], saved: Any, d_out: jax.Array) -> tuple[jax.Array, None]:
    weight, tokens = saved

    def local(piece: jax.Array, tokens: jax.Array, d_out: jax.Array) -> jax.Array:
        tokens, mine = _columns(_of_group(tokens), piece.shape[0])
        d_out = lax.all_to_all(d_out, "fsdp", split_axis=2, concat_axis=0, tiled=True)
        d_out = jnp.where(mine[..., None], d_out, 0).astype(piece.dtype)
        return lax.psum(jnp.zeros_like(piece).at[tokens].add(d_out), "data")

    run = _run(static[0], local, (_TABLE, _ROWS, _ROWS), _TABLE)
    return run(weight, tokens, d_out), None


def _own_rows(piece: jax.Array, tokens: jax.Array, *, dtype: Any) -> jax.Array:
    """What the tensor group's pieces hold of some tokens, for the features of this piece."""
    tokens, mine = _columns(tokens, piece.shape[0])
    found = jnp.where(mine[..., None], piece[tokens], 0).astype(dtype)
    return lax.psum(found, "tensor")  # one of them is not zero


def _of_group(tokens: jax.Array) -> jax.Array:
    """Tokens of all rows of the fsdp group."""
    return lax.all_gather(tokens, "fsdp", axis=0, tiled=True)


def _columns(tokens: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Tokens counted from this piece's first, and which it has."""
    tokens = tokens - lax.axis_index("tensor") * vocab
    mine = (tokens >= 0) & (tokens < vocab)
    return jnp.where(mine, tokens, 0), mine


def _run(mesh: Mesh, local: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


_lookup.defvjp(_save, _gradient)
