"""A state as a flat table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.checkpoint.leaves import differences, local_bytes, named_leaves, nested, spec
from jaxrl.errors import CheckpointError


def test_names_are_paths_in_the_order_of_leaves() -> None:
    tree = {"b": [np.zeros(1), None], "a": {"x": np.ones(2)}}
    named = named_leaves(tree)
    assert list(named) == ["a/x", "b/0"]
    leaves = zip(named.values(), jax.tree.leaves(tree), strict=True)
    assert all(one is other for one, other in leaves)
    assert nested(named, "a") == {"x": tree["a"]["x"]}


def test_names_that_would_collide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="same path"):
        named_leaves({"a/b": 1, "a": {"b": 2}})


def test_nested_takes_whole_names_only() -> None:
    named = {"policy/a/b": 1, "policy/a/c": 2, "policy_opt/a": 3}
    assert nested(named, "policy") == {"a": {"b": 1, "c": 2}}


def test_spec_and_bytes() -> None:
    assert spec(jnp.zeros((2, 3), jnp.bfloat16)) == [[2, 3], "bfloat16"]
    assert spec(jax.ShapeDtypeStruct((4,), jnp.int32)) == [[4], "int32"]
    assert spec(np.float32(1)) == [[], "float32"]
    assert local_bytes(jnp.zeros((2, 3), jnp.bfloat16)) == 12
    assert local_bytes(np.zeros(3)) == 24


def test_differences() -> None:
    saved = {"same": [[1], "int32"], "shape": [[1, 2], "int32"], "gone": [[], "int32"]}
    wanted = {"same": [[1], "int32"], "shape": [[2, 2], "int32"], "new": [[], "bool"]}
    assert differences(saved, wanted) == [
        "gone: int32[] in the checkpoint, nothing in this run",
        "new: nothing in the checkpoint, bool[] in this run",
        "shape: int32[1, 2] in the checkpoint, int32[2, 2] in this run",
    ]
