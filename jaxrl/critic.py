"""The critic: a head on the policy's trunk, or a trunk of its own; and the `Forward` of both.

The value head is float32 and starts at exactly zero, so every first value is 0, unless the head of
a reward model or of an earlier critic is kept (`critic.keep_head`): then the first value of a state
is what that model would give to the text up to there. The head's parameters, and an own trunk, are
a tree separate from the policy's everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.config import CriticConfig
from jaxrl.logprobs import HeadSplit, PlacedHead, TiedHead
from jaxrl.models import Model, value_head_apply, value_head_init
from jaxrl.sharding import platform_of
from jaxrl.steps import Forward, predicting_hidden, row_inputs
from jaxrl.types import PackedBatch

__all__ = ["init_value_params", "make_forward"]

_TRUNK = ("embed", "layers", "norm")


def make_forward(model: Model, critic: CriticConfig | None, *, branches: bool = True) -> Forward:
    """The callables the steps need.  critic None: no value function (advantage_mode grpo).

    V(state before token t) is read where token t is predicted: at the position before it. Values
    are never divided by the sampling temperature. Where no two responses share a prompt
    (`packing.share_prompts`), a segment has one branch, and attention need not look at them.
    """
    mesh = model.mesh
    split = None if mesh is None or mesh.size == 1 else HeadSplit(mesh)

    def head(params: Any) -> PlacedHead:
        # A tied head is read as it lies: its transpose would be a copy of the embedding a pass.
        tied = model.config.tie_word_embeddings
        kernel = TiedHead(params["embed"]["weight"]) if tied else model.head(params)
        return PlacedHead(kernel, jnp.dtype(model.dtype), split, platform_of(mesh))

    def trunk_of(params: Any, *inputs: jax.Array) -> jax.Array:
        return model.hidden(params, *(inputs if branches else inputs[:-1]))

    if critic is None:
        return Forward(trunk_of, head, None)

    def head_values(value_params: Any, hidden: jax.Array, packed: PackedBatch) -> jax.Array:
        trunk = hidden if critic.trunk_gradient else lax.stop_gradient(hidden)
        return value_head_apply(value_params["value_head"], predicting_hidden(trunk, packed))

    def own_values(value_params: Any, hidden: Any, packed: PackedBatch) -> jax.Array:
        del hidden
        own = trunk_of(value_params["trunk"], *row_inputs(packed))
        return value_head_apply(value_params["value_head"], predicting_hidden(own, packed))

    if critic.kind == "model":
        return Forward(trunk_of, head, own_values, separate=True)
    return Forward(trunk_of, head, head_values)


def init_value_params(
    model: Model, critic: CriticConfig | None, trunk: Any, head: Any = None
) -> dict[str, Any]:
    """Value parameters: the head, and for kind=model a copy of `trunk` without its head.

    Args:
        model: The policy's decoder, whose shape a critic's own trunk has too.
        critic: None gives no parameters.
        trunk: Parameters of a decoder; may hold an output head, which is left out.
        head: What the head starts from: "kernel" [hidden, 1], a reward model's row, and "bias" [1]
            if an earlier critic's. What is missing is exactly zero.
    """
    if critic is None:
        return {}
    given = {name: jnp.asarray(weight, jnp.float32) for name, weight in (head or {}).items()}
    value_head = value_head_init(model.config.hidden_size) | given
    params: dict[str, Any] = {"value_head": value_head}
    if critic.kind == "model":
        kept = {name: weight for name, weight in trunk.items() if name in _TRUNK}
        params["trunk"] = jax.tree.map(jnp.copy, kept)
    return params
