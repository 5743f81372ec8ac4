"""The decoder: embedding, a stack of layers, final norm. One block serves every layer.

`Decoder` scans over the layers, whose weights lie stacked: one layer is compiled, and recomputed in
the backward pass. `extend` writes the layers out, each with its own keys and values: a scan would
copy weights and cache of each layer out of the stacks in every step of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxrl.models.attention import chosen_method
from jaxrl.models.block import STREAM, Block, KeysValues, Scene, Settings
from jaxrl.models.embedding import embed
from jaxrl.models.layers import RMSNorm
from jaxrl.models.rope import rope_tables
from jaxrl.models.sight import ATTENDED, Sight
from jaxrl.sharding import constrain

__all__ = ["REMAT", "Decoder", "extend"]

REMAT = ("none", "dots", "attention", "full")
"""What a layer keeps for its backward pass: everything; matrix products; its input and what
attention gave; its input only."""


class Decoder(nn.Module):
    """Tokens to hidden states after the final norm; the head is the caller's."""

    settings: Settings
    remat: str

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch query"],
        positions: Int[Array, "batch query"],
        sight: Sight,
        caches: KeysValues | None = None,
    ) -> tuple[Float[Array, "batch query embed"], KeysValues | None]:
        """Run the stack; caches have a leading layer axis, and come back with what was written."""
        config = self.settings.config
        settings = _settled(self.settings, sight)
        x = constrain(settings.mesh, _Embed(settings, name="embed")(tokens), STREAM)
        count = config.num_hidden_layers
        stack = nn.scan(
            _rematerialised(self.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 0, nn.broadcast),  # type: ignore[arg-type]
            length=count,
        )(settings, name="layers")
        windows = jnp.asarray(config.windows or (0,) * count, jnp.int32)
        x, caches = stack(x, caches, windows, _scene(settings, positions, sight))
        return RMSNorm(config.rms_norm_eps, name="norm")(x), caches


def extend(
    settings: Settings,
    params: Any,
    tokens: Int[Array, "batch query"],
    positions: Int[Array, "batch query"],
    sight: Sight,
    caches: Sequence[KeysValues],
) -> tuple[Float[Array, "batch query embed"], list[KeysValues]]:
    """`Decoder` with a cache a layer; keys and values go to its columns from `sight.first` on.

    params: a decoder's, "layers" a list of one layer each.
    """
    config = settings.config
    settings = _settled(settings, sight)
    x = _Embed(settings).apply({"params": params["embed"]}, tokens)
    x = constrain(settings.mesh, x, STREAM)  # type: ignore[arg-type]
    scene, block, after = _scene(settings, positions, sight), Block(settings), []
    windows = config.windows or (0,) * len(caches)
    for weights, window, cache in zip(params["layers"], windows, caches, strict=True):
        output: Any = block.apply({"params": weights}, x, cache, jnp.int32(window), scene)
        x = output[0]
        after.append(output[1])
    norm: Any = RMSNorm(config.rms_norm_eps).apply({"params": params["norm"]}, x)
    return norm, after


def _settled(settings: Settings, sight: Sight) -> Settings:
    """With the way of attention that these queries and keys come to."""
    way = chosen_method(settings.attention, settings.mesh, sight, settings.config.head_dim)
    return settings._replace(attention=way)


def _scene(settings: Settings, positions: Int[Array, "batch query"], sight: Sight) -> Scene:
    config, dense = settings.config, settings.attention == "dense"
    cos, sin = rope_tables(config.rope, config.head_dim, positions)
    mask = sight.everything() if dense else None
    distance = None
    if dense and sight.q_positions is not None and sight.k_positions is not None:
        distance = sight.q_positions[:, :, None] - sight.k_positions[:, None, :]
    return Scene(cos, sin, sight, mask, distance)


class _Embed(nn.Module):
    settings: Settings

    @nn.compact
    def __call__(self, tokens: Int[Array, "batch query"]) -> Float[Array, "batch query embed"]:
        config, dtype, mesh, _, gathered = self.settings
        shape = (config.vocab_size, config.hidden_size)
        weight = self.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)
        return embed(mesh, weight, tokens, dtype, gathered=gathered)


def _rematerialised(remat: str) -> type[Block]:
    """The block under a checkpoint policy; a scan needs no protection against CSE."""
    if remat == "none":
        return Block
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.dots_saveable,
        "attention": policies.save_only_these_names(ATTENDED),
        "full": None,
    }
    return nn.remat(Block, prevent_cse=False, policy=policy[remat])
