"""One table of a decoder's parameters: our path, Hugging Face's name, the layout of each, axes.

Import, export, sharding and publishing read this table, so a tensor is named in one place only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxrl.models.config import ModelConfig

LOGICAL_AXES = ("vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers")
"""Names that a `Weight` uses for its axes; None is an axis that is never split."""


@dataclass(frozen=True)
class Weight:
    """One parameter of the decoder, in our layout and in Hugging Face's.

    A stacked weight holds all layers on a leading axis; its `hf_name` has "{layer}" in it, and
    `shape`, `hf_shape`, `from_hf` and `to_hf` speak of one layer. `axes` and `full_shape` describe
    our whole array, the leading "layers" axis included.
    """

    path: tuple[str, ...]
    hf_name: str
    split: tuple[int, ...]
    """The Hugging Face tensor, reshaped: [heads * head_dim, embed] to [heads, head_dim, embed]."""
    order: tuple[int, ...]
    """Transposition of `split` that gives our layout."""
    hf_shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    layers: int
    """How many layers are stacked; 0: not a stacked weight."""
    kind: str
    """How it starts: "normal", "ones" or "zeros"."""

    @property
    def stacked(self) -> bool:
        """Whether our array holds all layers on a leading axis."""
        return self.layers > 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Our shape, of one layer if stacked."""
        return tuple(self.split[axis] for axis in self.order)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Our shape, the layers axis included."""
        return (self.layers, *self.shape) if self.stacked else self.shape

    def hf_names(self) -> tuple[str, ...]:
        """The tensors in a Hugging Face file that make up this weight, in layer order."""
        if not self.stacked:
            return (self.hf_name,)
        return tuple(self.hf_name.format(layer=layer) for layer in range(self.layers))

    def from_hf(self, tensor: np.ndarray) -> np.ndarray:
        """One Hugging Face tensor in our layout (a view where possible)."""
        return tensor.reshape(self.split).transpose(self.order)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """One layer of ours in Hugging Face's layout (a view where possible)."""
        back = tuple(int(axis) for axis in np.argsort(self.order))
        return array.transpose(back).reshape(self.hf_shape)


def weight_table(config: ModelConfig) -> tuple[Weight, ...]:
    """Every parameter of the decoder that `config` describes, in the order of a forward pass."""
    vocab, width = config.vocab_size, config.hidden_size
    embed = ("vocab", "embed")
    table = [_single(("embed", "weight"), "model.embed_tokens.weight", (vocab, width), embed)]
    table += _layer_table(config)
    table.append(_single(("norm", "scale"), "model.norm.weight", (width,), (None,), kind="ones"))
    if not config.tie_word_embeddings:
        table.append(
            _single(("head", "kernel"), "lm_head.weight", (vocab, width), embed[::-1], order=(1, 0))
        )
    return tuple(table)


def score_weight(config: ModelConfig) -> Weight:
    """The output row of a classifier with one label, which is a value head's kernel."""
    path, shape = ("value_head", "kernel"), (1, config.hidden_size)
    return _single(path, "score.weight", shape, (None, None), order=(1, 0))


def score_bias() -> Weight:
    """The bias of a token classifier with one label, which is a value head's."""
    return _single(("value_head", "bias"), "score.bias", (1,), (None,), kind="zeros")


def _single(
    path: tuple[str, ...],
    hf_name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    order: tuple[int, ...] | None = None,
    kind: str = "normal",
) -> Weight:
    order = tuple(range(len(shape))) if order is None else order
    return Weight(path, hf_name, shape, order, shape, axes, 0, kind)


def _layer_table(config: ModelConfig) -> list[Weight]:
    width, inner = config.hidden_size, config.intermediate_size
    size = config.head_dim
    table: list[Weight] = []

    def add(
        path: str,
        hf_name: str,
        split: tuple[int, ...],
        order: tuple[int, ...],
        axes: tuple[str | None, ...],
        kind: str,
        merge: int | None = None,
    ) -> None:
        # merge: the axis of `split` that Hugging Face keeps in one piece with the next.
        hf_shape = split
        if merge is not None:
            joined = math.prod(split[merge : merge + 2])
            hf_shape = (*split[:merge], joined, *split[merge + 2 :])
        table.append(
            Weight(
                path=("layers", *path.split(".")),
                hf_name="model.layers.{layer}." + hf_name,
                split=split,
                order=order,
                hf_shape=hf_shape,
                axes=("layers", *axes),
                layers=config.num_hidden_layers,
                kind=kind,
            )
        )

    def norm(path: str, hf_name: str, length: int) -> None:
        add(f"{path}.scale", f"{hf_name}.weight", (length,), (0,), (None,), "ones")

    norm("attention_norm", "input_layernorm", width)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, count, axis in (
        ("q", heads, "heads"),
        ("k", kv_heads, "kv_heads"),
        ("v", kv_heads, "kv_heads"),
    ):
        hf, ours = f"self_attn.{name}_proj", f"attention.{name}"
        axes = ("embed", axis, "head_dim")
        add(f"{ours}.kernel", f"{hf}.weight", (count, size, width), (2, 0, 1), axes, "normal", 0)
        if config.qkv_bias:
            add(f"{ours}.bias", f"{hf}.bias", (count, size), (0, 1), axes[1:], "zeros", 0)
    if config.qk_norm:
        norm("attention.q_norm", "self_attn.q_norm", size)
        norm("attention.k_norm", "self_attn.k_norm", size)
    axes = ("heads", "head_dim", "embed")
    hf, ours = "self_attn.o_proj", "attention.o"
    add(f"{ours}.kernel", f"{hf}.weight", (width, heads, size), (1, 2, 0), axes, "normal", 1)
    if config.output_bias:
        add(f"{ours}.bias", f"{hf}.bias", (width,), (0,), (None,), "zeros")
    norm("mlp_norm", "post_attention_layernorm", width)
    for name, rows, columns, axes in (
        ("gate", inner, width, ("embed", "mlp")),
        ("up", inner, width, ("embed", "mlp")),
        ("down", width, inner, ("mlp", "embed")),
    ):
        hf, ours = f"mlp.{name}_proj", f"mlp.{name}"
        add(f"{ours}.kernel", f"{hf}.weight", (rows, columns), (1, 0), axes, "normal")
        if config.mlp_bias:
            bias_axis = "mlp" if rows == inner and name != "down" else None
            add(f"{ours}.bias", f"{hf}.bias", (rows,), (0,), (bias_axis,), "zeros")
    return table
