"""The decoder: embedding, a scanned stack of layers, final norm. One block serves every layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.config import ModelConfig
from jaxrl.models.layers import Projection, RMSNorm, attention
from jaxrl.models.rope import rope_tables, rotate

REMAT = ("none", "dots", "full")
"""What a layer keeps for its backward pass: everything; matrix products; its input only."""

KeysValues = tuple[Float[Array, "layers batch slots kv_heads head_dim"], ...]


class Scene(NamedTuple):
    """What all layers share: rope tables, who sees whom, and where new keys go in a cache."""

    cos: Float[Array, "batch query half"]
    sin: Float[Array, "batch query half"]
    mask: Bool[Array, "batch query key"]
    """Without the sliding window."""
    distance: Int[Array, "batch query key"] | None
    """Query position minus key position, when some layer has a window."""
    column: Int[Array, ""] | int
    """First cache column to write."""


class Attention(nn.Module):
    """Projections, optional norms of queries and keys, rope, attention, output projection."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch query embed"],
        scene: Scene,
        mask: Bool[Array, "batch query key"],
        layer: Int[Array, ""],
        cache: KeysValues | None,
    ) -> tuple[Float[Array, "batch query embed"], KeysValues | None]:
        """Attend within x, or with a cache: write x's keys and values there and attend to it."""
        config = self.config
        width, size = config.hidden_size, config.head_dim
        project = functools.partial(Projection, use_bias=config.qkv_bias, dtype=self.dtype)
        q = project((width, config.num_attention_heads, size), name="q")(x)
        k = project((width, config.num_key_value_heads, size), name="k")(x)
        v = project((width, config.num_key_value_heads, size), name="v")(x)
        if config.qk_norm:
            q = RMSNorm(config.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(config.rms_norm_eps, name="k_norm")(k)
        q, k = rotate(q, scene.cos, scene.sin), rotate(k, scene.cos, scene.sin)
        if cache is not None:
            # The whole cache is the scan's carry, so XLA updates it in place: no copy a layer.
            start = (layer, 0, scene.column, 0, 0)
            cache = tuple(
                lax.dynamic_update_slice(old, new[None], start)
                for old, new in zip(cache, (k, v), strict=True)
            )
            k, v = (lax.dynamic_index_in_dim(array, layer, 0, keepdims=False) for array in cache)
        attended = attention(q, k, v, mask)
        shape = (config.num_attention_heads, size, width)
        output = Projection(shape, config.output_bias, self.dtype, contract=2, name="o")
        return output(attended), cache


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch query embed"]) -> Float[Array, "batch query embed"]:
        """Gated feed-forward of each position."""
        width, inner = self.config.hidden_size, self.config.intermediate_size
        project = functools.partial(Projection, use_bias=self.config.mlp_bias, dtype=self.dtype)
        gate = project((width, inner), name="gate")(x)
        up = project((width, inner), name="up")(x)
        return project((inner, width), name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """One layer, shaped as the body of a scan: carry in, carry out."""

    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "batch query embed"], KeysValues | None],
        layer: Int[Array, ""],
        window: Int[Array, ""],
        scene: Scene,
    ) -> tuple[tuple[Float[Array, "batch query embed"], KeysValues | None], None]:
        """Attention and MLP, each normalised on the way in and added to the residual stream."""
        x, cache = carry
        mask = scene.mask
        if scene.distance is not None:
            mask = mask & ((window == 0) | (scene.distance < window))
        eps = self.config.rms_norm_eps
        attend = Attention(self.config, self.dtype, name="attention")
        update, cache = attend(RMSNorm(eps, name="attention_norm")(x), scene, mask, layer, cache)
        x = x + update
        x = x + MLP(self.config, self.dtype, name="mlp")(RMSNorm(eps, name="mlp_norm")(x))
        return (x, cache), None


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm; the head is the caller's."""

    config: ModelConfig
    dtype: Any
    remat: str

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch query"],
        positions: Int[Array, "batch query"],
        mask: Bool[Array, "batch query key"],
        key_positions: Int[Array, "batch key"],
        cache: KeysValues | None = None,
        column: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "batch query embed"], KeysValues | None]:
        """Run the stack; with a cache, keys and values go to its columns from `column` on."""
        config = self.config
        embed = _Embed(config, self.dtype, name="embed")
        cos, sin = rope_tables(config.rope, config.head_dim, positions)
        distance = positions[:, :, None] - key_positions[:, None, :] if config.windows else None
        scene = Scene(cos, sin, mask, distance, column)
        count = config.num_hidden_layers
        stack = nn.scan(
            _rematerialised(self.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast),  # type: ignore[arg-type]
            length=count,
        )(config, self.dtype, name="layers")
        windows = jnp.asarray(config.windows or (0,) * count, jnp.int32)
        layers = jnp.arange(count, dtype=jnp.int32)
        (x, cache), _ = stack((embed(tokens), cache), layers, windows, scene)
        return RMSNorm(config.rms_norm_eps, name="norm")(x), cache


class _Embed(nn.Module):
    config: ModelConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch query"]) -> Float[Array, "batch query embed"]:
        shape = (self.config.vocab_size, self.config.hidden_size)
        weight = self.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)
        return weight[tokens].astype(self.dtype)


def _rematerialised(remat: str) -> type[Block]:
    """The block under a checkpoint policy; a scan needs no protection against CSE."""
    if remat == "none":
        return Block
    policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
    return nn.remat(Block, prevent_cse=False, policy=policy)
