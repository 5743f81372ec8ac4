"""`Model`: the decoder as plain functions of nested dicts. What the rest of the house sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl.errors import ConfigError
from jaxrl.models.attention import METHODS, chosen_method
from jaxrl.models.block import CACHED, KeysValues, Settings
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import REMAT, Decoder, extend
from jaxrl.models.sight import Sight
from jaxrl.models.weights import Weight, weight_table
from jaxrl.sharding import constrain
from jaxrl.types import pytree

DTYPES = ("float32", "bfloat16")
Params = Mapping[str, Any]


@pytree
class Cache:
    """Keys and values of the tokens so far; `index` columns are in use.

    Fields are arrays, or what stands for one in a tree of shapes or shardings.
    """

    k: Any
    """A list, for each layer [batch, kv_heads, columns, head_dim], compute dtype; rotated."""
    v: Any
    """Like k."""
    positions: Any
    """int32 [batch, columns]: position of each column's token; -1: empty or padding, never seen."""
    index: Any
    """int32 scalar: the next column, the same for all rows."""


@dataclass(frozen=True)
class Model:
    """One decoder: static settings here, parameters in a plain dict that is always an argument.

    Parameters: {"embed", "layers" (leading layer axis), "norm", and "head" unless tied}, float32.
    `weight_table(config)` lists them. Tokens, positions and segment ids are int32 [batch, time].
    """

    config: ModelConfig
    dtype: str = "float32"
    """Compute dtype, "float32" or "bfloat16"."""
    remat: str = "full"
    """What a layer keeps for the backward pass: "none" (everything), "dots", "attention" (its input
    and what attention gave), "full" (its input)."""
    attention: str = "auto"
    """"dense": scores of all pairs at once; "blockwise", and on TPUs "splash": memory linear in
    length; "auto"."""
    mesh: Mesh | None = None
    """Where activations are split and weights gathered for use; None: one device, or the
    compiler's choice."""

    gathered: bool = False
    """Whether parameters come as `for_sampling` gathers them, instead of split over fsdp."""

    def __post_init__(self) -> None:
        """Refuse an unknown dtype, policy or way of attention."""
        for name, allowed in (("dtype", DTYPES), ("remat", REMAT), ("attention", METHODS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {allowed}")

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Random float32 parameters: normal(0, initializer_range), norms 1, biases 0."""
        table = weight_table(self.config)
        keys = jax.random.split(key, len(table))
        return unflatten_dict(
            {weight.path: self._start(weight, key) for weight, key in zip(table, keys, strict=True)}
        )

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"],
        branch_ids: Int[Array, "batch time"] | None = None,
    ) -> Float[Array, "batch time embed"]:
        """Hidden states after the final norm, in the compute dtype.

        A token sees the tokens before it (and itself) with its own segment id, within the sliding
        window where the layer has one. Segment 0 is padding: it sees padding only, so that it
        stays finite, and nothing else sees it. With branch ids it sees, of those, only branch 0
        (a shared prompt) and its own branch (one of the responses to it).
        """
        placed = positions if self.config.windows else None
        sight = Sight(segment_ids, segment_ids, branch_ids, branch_ids, placed, placed)
        decoder = Decoder(self._settings, self.remat)
        output: Any = decoder.apply({"params": _trunk(params)}, tokens, positions, sight)
        return output[0]

    def prefill(
        self,
        params: Params,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "batch time"],
        segment_ids: Int[Array, "batch time"],
    ) -> tuple[Float[Array, "batch time embed"], KeysValues]:
        """`hidden`, and what a cache is filled with.

        That is the keys (rotated) and values of all layers in the compute dtype, each [layers,
        batch, kv_heads, time, head_dim].
        """
        config = self.config
        placed = positions if config.windows else None
        sight = Sight(segment_ids, segment_ids, None, None, placed, placed)
        sizes = (len(tokens), config.num_key_value_heads, tokens.shape[1], config.head_dim)
        empty = jnp.zeros((config.num_hidden_layers, *sizes), self.dtype)
        decoder = Decoder(self._settings, "none")
        variables = {"params": _trunk(params)}
        output: Any = decoder.apply(variables, tokens, positions, sight, (empty, empty))
        return output

    def attention_for(self, length: int, *, branches: bool) -> str:
        """How attention of rows of that length is computed here, with shared prompts or without."""
        row = jax.ShapeDtypeStruct((1, length), jnp.int32)
        placed = row if self.config.windows else None
        shared = row if branches else None
        sight: Any = Sight(row, row, shared, shared, placed, placed)  # type: ignore[arg-type]
        return chosen_method(self.attention, self.mesh, sight, self.config.head_dim)

    def head(self, params: Params) -> Float[Array, "embed vocab"]:
        """The output projection; the embedding transposed where they are tied."""
        if self.config.tie_word_embeddings:
            return params["embed"]["weight"].T
        return params["head"]["kernel"]

    def logits(
        self, params: Params, hidden: Float[Array, "batch embed"]
    ) -> Float[Array, "batch vocab"]:
        """Logits of one position of each row, float32, with parameters from `for_sampling`."""
        # The larger matrix first: of few rows, XLA on CPU would rearrange it for each product.
        return jnp.dot(params["unembed"], hidden.T, preferred_element_type=jnp.float32).T

    def for_sampling(self, params: Params, *, gather: bool) -> dict[str, Any]:
        """Parameters as a decoding loop wants them: cast, a list of layers, and "unembed".

        That is the head as [vocab, embed]. So no step of the loop casts, turns, or cuts a layer out
        of a stack. With `gather` each device gets all that it multiplies with (its tensor part,
        whole over fsdp), and no step of the loop has to fetch it. Run op by op, what is already as
        it should be is not copied.
        """

        def ready(array: jax.Array, axes: Sequence[str | None]) -> jax.Array:
            array = array.astype(self.dtype)
            if not gather or self.mesh is None or self.mesh.size == 1:
                return array
            array = lax.optimization_barrier(array)  # cast, then sent: half of it travels
            return constrain(self.mesh, array, [axis or "features" for axis in axes])

        table = weight_table(self.config)
        arrays: dict[Any, Any] = dict(flatten_dict(params))
        weights = {w.path: ready(arrays[w.path], w.axes) for w in table if not w.stacked}
        layers = [
            {w.path[1:]: ready(arrays[w.path][i], w.axes[1:]) for w in table if w.stacked}
            for i in range(self.config.num_hidden_layers)
        ]
        tree: dict[str, Any] = unflatten_dict(weights)
        unembed = self.head(tree).T if "head" in tree else tree["embed"]["weight"]
        return tree | {"layers": [*map(unflatten_dict, layers)], "unembed": unembed}

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache of `length` columns, in the compute dtype."""
        config = self.config
        shape = (batch, config.num_key_value_heads, length, config.head_dim)

        def empty() -> list[jax.Array]:
            zeros = (jnp.zeros(shape, self.dtype) for _ in range(config.num_hidden_layers))
            return [constrain(self.mesh, array, CACHED) for array in zeros]

        return Cache(
            k=empty(),
            v=empty(),
            positions=jnp.full((batch, length), -1, jnp.int32),
            index=jnp.zeros((), jnp.int32),
        )

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "batch query"],
        positions: Int[Array, "batch query"],
        cache: Cache,
    ) -> tuple[Float[Array, "batch query embed"], Cache]:
        """Hidden states of the next tokens of every row, and the cache with them in it.

        Prefill and decoding alike. The tokens go to columns index .. index + query - 1 of all
        rows, so shorter prompts are padded on the left, with position -1. A token at position p
        sees cached tokens at positions 0 .. p, within the window. What comes back at padding is
        finite and means nothing. The caller keeps index + query within the cache's length.
        """
        start = (0, cache.index)
        seen = lax.dynamic_update_slice(cache.positions, positions.astype(jnp.int32), start)
        placed = (positions, seen) if self.config.windows else (None, None)
        # Positions rise along the columns of a row, so what is before a token is what it sees.
        ours, theirs = (positions >= 0).astype(jnp.int32), (seen >= 0).astype(jnp.int32)
        sight = Sight(ours, theirs, None, None, *placed, first=cache.index)
        caches = list(zip(cache.k, cache.v, strict=True))
        hidden, caches = extend(self._settings, params, tokens, positions, sight, caches)
        k, v = ([pair[i] for pair in caches] for i in (0, 1))
        return hidden, Cache(k=k, v=v, positions=seen, index=cache.index + tokens.shape[1])

    @property
    def _settings(self) -> Settings:
        dtype = jnp.dtype(self.dtype)
        return Settings(self.config, dtype, self.mesh, self.attention, self.gathered)

    def _start(self, weight: Weight, key: jax.Array) -> jax.Array:
        if weight.kind == "normal":
            normal = jax.random.normal(key, weight.full_shape, jnp.float32)
            return normal * self.config.initializer_range
        return jnp.full(weight.full_shape, 1.0 if weight.kind == "ones" else 0.0, jnp.float32)


def _trunk(params: Params) -> dict[str, Any]:
    """What the decoder reads; a critic's trunk has no head, a policy's is applied elsewhere."""
    return {name: params[name] for name in ("embed", "layers", "norm")}
