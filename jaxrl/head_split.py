"""The output head as a mesh keeps it: columns over one axis, features over another.

Every device evaluates its own rows against its own columns of the vocabulary. What is exchanged is
one number a token and sum (largest logit, log-sum-exp, moment, target), the gradient of the hidden
states, and the head's features. Logits, and the whole head, are never on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jaxrl.head_inputs import HeadInputs, TiedHead

__all__ = ["HeadSplit", "PlacedHead"]


class HeadSplit(NamedTuple):
    """Which mesh axes split what; hashable, a part of a compiled program's identity."""

    mesh: Mesh
    rows: tuple[str, ...] = ("data", "fsdp")
    """Rows of hidden states, targets and masks."""
    vocab: str = "tensor"
    """Columns of the head."""
    embed: str = "fsdp"
    """Features of the head: gathered where it is multiplied."""

    @property
    def row_shards(self) -> int:
        """Into how many parts rows are split."""
        return _size(self.mesh, self.rows)

    @property
    def vocab_shards(self) -> int:
        """Into how many parts the vocabulary is split."""
        return self.mesh.shape[self.vocab]

    def check(self, inputs: HeadInputs) -> None:
        """Raise ValueError unless every axis divides."""
        sizes = (
            ("rows of hidden", inputs.targets.shape[0], self.rows),
            ("the vocabulary of head", inputs.vocab, (self.vocab,)),
            ("the features of head", inputs.hidden.shape[-1], (self.embed,)),
        )
        for what, size, axes in sizes:
            if size % _size(self.mesh, axes):
                raise ValueError(
                    f"{what}: {size}; expected a multiple of {_size(self.mesh, axes)}, the size of "
                    f"mesh axes {axes}"
                )

    def specs(self, inputs: HeadInputs) -> HeadInputs:
        """Where each input lies."""
        rows, columns = PartitionSpec(self.rows), PartitionSpec(self.vocab)
        return HeadInputs(
            hidden=rows,  # type: ignore[arg-type]
            head=inputs.like_head(self.matrix_spec(inputs.layout)),  # type: ignore[arg-type]
            bias=None if inputs.bias is None else columns,  # type: ignore[arg-type]
            temperature=rows if inputs.temperature.ndim else PartitionSpec(),  # type: ignore[arg-type]
            targets=rows,  # type: ignore[arg-type]
            mask=None if inputs.mask is None else rows,  # type: ignore[arg-type]
        )

    def matrix_spec(self, layout: str) -> PartitionSpec:
        """Where the head's array lies, from its axes as einsum letters."""
        names = {"v": self.vocab, "d": self.embed}
        return PartitionSpec(*(names[letter] for letter in layout))

    def run(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`local` on every device's part."""
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    # What follows is for use inside of `run`.

    def own_targets(self, inputs: HeadInputs) -> HeadInputs:
        """Targets counted from this device's first column; -1 where another device has them."""
        first = lax.axis_index(self.vocab) * inputs.vocab
        mine = (inputs.targets >= first) & (inputs.targets < first + inputs.vocab)
        return inputs._replace(targets=jnp.where(mine, inputs.targets - first, -1))

    def gather(self, inputs: HeadInputs) -> HeadInputs:
        """All features of the columns at hand."""
        axis = inputs.layout.index("d")
        matrix = lax.all_gather(inputs.matrix, self.embed, axis=axis, tiled=True)
        return inputs._replace(head=inputs.like_head(matrix))

    def scatter(self, matrix: jax.Array, axis: int) -> jax.Array:
        """A gradient of whole features, summed over all rows, to this device's features."""
        others = tuple(name for name in self.rows if name != self.embed)
        if self.embed not in self.rows:
            width = matrix.shape[axis] // self.mesh.shape[self.embed]
            start = lax.axis_index(self.embed) * width
            return lax.dynamic_slice_in_dim(lax.psum(matrix, others), start, width, axis)
        part = lax.psum_scatter(matrix, self.embed, scatter_dimension=axis, tiled=True)
        return lax.psum(part, others) if others else part

    def over_rows(self, x: jax.Array) -> jax.Array:
        """Sum over all rows' devices."""
        return lax.psum(x, self.rows)

    def over_vocab(self, x: jax.Array) -> jax.Array:
        """Sum over all columns' devices."""
        return lax.psum(x, self.vocab)

    def largest(self, x: jax.Array) -> jax.Array:
        """Largest over all columns' devices."""
        return lax.pmax(x, self.vocab)


class PlacedHead(NamedTuple):
    """A head, the dtype it is multiplied in, and where a mesh keeps it."""

    head: ArrayLike | TiedHead
    dtype: Any = None
    """Cast block by block as it is used, so that its gradient is summed and returned in the head's
    own dtype; None: the wider of hidden's and head's."""
    split: HeadSplit | None = None
    """None: all on one device, or as the compiler decides."""
    platform: str | None = None
    """Kind of device, for which blocks are sized; None: JAX's default backend."""


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size
