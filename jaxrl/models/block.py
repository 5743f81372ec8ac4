"""One layer of the decoder: attention, gated MLP, and what all layers of a pass share."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.attention import attention, local_attention
from jaxrl.models.config import ModelConfig
from jaxrl.models.layers import Projection, RMSNorm
from jaxrl.models.rope import rotate
from jaxrl.models.sight import Sight
from jaxrl.sharding import constrain

__all__ = ["CACHED", "STREAM", "Block", "KeysValues", "Scene", "Settings"]

STREAM = ("batch", "time", "features")
"""Logical axes of the residual stream: rows split over data x fsdp, whole otherwise."""
CACHED = ("batch", "kv_heads", "time", "head_dim")
"""Of one layer's keys, and values: as the products of one new query with them read them."""

KeysValues = tuple[Float[Array, "batch kv_heads slots head_dim"], ...]
"""One layer's."""


class Settings(NamedTuple):
    """What every part of the decoder is told, static."""

    config: ModelConfig
    dtype: Any
    mesh: Mesh | None
    attention: str
    """How it is computed; see `attention.METHODS`."""
    gathered: bool
    """Whether weights come whole over fsdp already."""


class Scene(NamedTuple):
    """What all layers share: rope tables, who sees whom, and where new keys go in a cache."""

    cos: Float[Array, "batch query half"]
    sin: Float[Array, "batch query half"]
    sight: Sight
    """Its `first` is the first cache column to write."""
    mask: Bool[Array, "batch query key"] | None
    """Everything a query sees but for the sliding window, where attention is dense."""
    distance: Int[Array, "batch query key"] | None
    """Query position minus key position, with a mask and when some layer has a window."""

    def mask_of(self, window: Int[Array, ""]) -> Bool[Array, "batch query key"] | None:
        """The mask of a layer with that window (0: none)."""
        if self.mask is None or self.distance is None:
            return self.mask
        return self.mask & ((window == 0) | (self.distance < window))


class Attention(nn.Module):
    """Projections, optional norms of queries and keys, rope, attention, output projection."""

    settings: Settings

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch query embed"],
        scene: Scene,
        window: Int[Array, ""],
        cache: KeysValues | None,
    ) -> tuple[Float[Array, "batch query embed"], KeysValues | None]:
        """Attend within x, or with a cache: write x's keys and values there and attend to it."""
        config, dtype, mesh, way, _ = self.settings
        width, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        project = functools.partial(Projection, use_bias=config.qkv_bias, dtype=dtype, mesh=mesh)
        by_head = ("embed", "kv_heads", "head_dim")
        q = project((width, heads, size), ("embed", "heads", "head_dim"), name="q")(x)
        k = project((width, kv_heads, size), by_head, name="k")(x)
        v = project((width, kv_heads, size), by_head, name="v")(x)
        if config.qk_norm:
            q = RMSNorm(config.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(config.rms_norm_eps, name="k_norm")(k)
        q, k = rotate(q, scene.cos, scene.sin), rotate(k, scene.cos, scene.sin)
        if cache is not None:
            start = (0, 0, scene.sight.first, 0)
            cache = tuple(
                constrain(mesh, lax.dynamic_update_slice(old, new.swapaxes(1, 2), start), CACHED)
                for old, new in zip(cache, (k, v), strict=True)
            )
            k, v = (array.swapaxes(1, 2) for array in cache)
        mask = scene.mask_of(window)
        if mask is None:
            attended = local_attention(way, mesh, q, k, v, scene.sight, window)
        else:
            attended = attention(q, k, v, mask)
        output = Projection(
            (heads, size, width),
            ("heads", "head_dim", "embed"),
            use_bias=config.output_bias,
            dtype=dtype,
            mesh=mesh,
            contract=2,
            name="o",
        )
        return output(attended), cache


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    settings: Settings

    @nn.compact
    def __call__(self, x: Float[Array, "batch query embed"]) -> Float[Array, "batch query embed"]:
        """Gated feed-forward of each position."""
        config, dtype, mesh, _, _ = self.settings
        width, inner = config.hidden_size, config.intermediate_size
        project = functools.partial(Projection, use_bias=config.mlp_bias, dtype=dtype, mesh=mesh)
        gate = project((width, inner), ("embed", "mlp"), name="gate")(x)
        up = project((width, inner), ("embed", "mlp"), name="up")(x)
        return project((inner, width), ("mlp", "embed"), name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """One layer, shaped as the body of a scan: stream and its own cache in, both out."""

    settings: Settings

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch query embed"],
        cache: KeysValues | None,
        window: Int[Array, ""],
        scene: Scene,
    ) -> tuple[Float[Array, "batch query embed"], KeysValues | None]:
        """Attention and MLP, each normalised on the way in and added to the residual stream."""
        eps = self.settings.config.rms_norm_eps
        attend = Attention(self.settings, name="attention")
        update, cache = attend(RMSNorm(eps, name="attention_norm")(x), scene, window, cache)
        x = x + update
        x = x + MLP(self.settings, name="mlp")(RMSNorm(eps, name="mlp_norm")(x))
        return constrain(self.settings.mesh, x, STREAM), cache
