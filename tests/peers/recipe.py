"""What a recipe is made of, and the table that holds them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl import aggregate

Outputs = dict[str, Any]
RECIPES: dict[str, Callable[[Any, dict[str, Any]], Outputs]] = {}


class At(NamedTuple):
    """A result to be compared where `mask` is True; the peer leaves something else elsewhere."""

    value: Any
    mask: Any


class Inputs:
    """The inputs of a case as arrays, float masks as bool."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            array = np.asarray(value)
            setattr(self, name, array != 0 if name.endswith("mask") else array)


def recipe(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        RECIPES.update(dict.fromkeys(names, function))
        return function

    return register


def mode(p: dict) -> Any:
    levels = {True: "token-mean", False: "seq-mean-token-mean"}
    return p.get("loss_agg_mode", levels[p.get("token_level_loss", True)])


def policy_case(
    x: Any, p: dict, per_token: Callable[[jax.Array], Any], new: Any, m: Any, name: str
) -> Outputs:
    """Loss and gradient of an aggregated per-token loss."""

    def loss(new: jax.Array) -> jax.Array:
        return aggregate(per_token(new), m, mode=mode(p), horizon=m.shape[-1])

    value, gradient = jax.value_and_grad(loss)(new.astype(np.float32))
    return {"loss": value, name: gradient}
