"""A state as a flat table: each array under the path that leads to it, with shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.errors import CheckpointError

__all__ = ["differences", "local_bytes", "named_leaves", "nested", "spec"]


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path, e.g. policy_opt/0/mu/embed, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise CheckpointError('two arrays of the state have the same path; keep "/" out of names')
    return named


def nested(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The leaves below `prefix` as nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        if name.startswith(prefix + "/"):
            *parents, last = name.removeprefix(prefix + "/").split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = leaf
    return tree


def spec(leaf: Any) -> list[Any]:
    """[shape, dtype], as JSON keeps it."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return [list(np.shape(leaf)), str(dtype)]


def local_bytes(leaf: Any) -> int:
    """Bytes of a leaf that this process writes: of each shard, one copy."""
    if isinstance(leaf, jax.Array):
        return sum(one.data.nbytes for one in leaf.addressable_shards if one.replica_id == 0)
    return np.asarray(leaf).nbytes


def differences(saved: Mapping[str, Sequence[Any]], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each array that is not the same in both tables."""

    def text(specs: Mapping[str, Any], name: str) -> str:
        return f"{specs[name][1]}{specs[name][0]}" if name in specs else "nothing"

    return [
        f"{name}: {text(saved, name)} in the checkpoint, {text(wanted, name)} in this run"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
