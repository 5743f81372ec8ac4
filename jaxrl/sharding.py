"""Mesh, and where each array lies on it.

One rule a logical axis: heads, feed-forward and vocabulary over `tensor`, the embedding axis over
`fsdp`; rows of a batch over `data` x `fsdp`. Parameters are whole along `data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config import MeshConfig
from jaxrl.errors import ConfigError

__all__ = [
    "BATCH_AXES",
    "batch_sharding",
    "constrain",
    "make_mesh",
    "mesh_sizes",
    "own_mesh",
    "param_sharding",
    "place",
    "platform_of",
    "replicated",
    "to_host",
    "row_multiple",
    "tree_shardings",
]

BATCH_AXES = ("data", "fsdp")
RULES: Mapping[str | None, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "layers": None,
    None: None,
}
"""Logical axis of a parameter to mesh axis."""
AT_USE: Mapping[str, str | tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}
"""Logical axis of an activation, or of a weight where it is multiplied; what is not here is whole.

A weight is gathered over fsdp where it is used, so that rows, not products, are what fsdp splits.
"""


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Sizes of [data, fsdp, tensor] on so many devices, -1 filled in.

    Raises:
        ConfigError: When the sizes do not multiply to the number of devices.
    """
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    given = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    if list(sizes.values()).count(-1) > 1 or any(
        size < 1 and size != -1 for size in sizes.values()
    ):
        raise ConfigError(f"{given}: sizes are at least 1, and at most one of them may be -1")
    if -1 in sizes.values() and devices % fixed == 0:
        sizes = {k: devices // fixed if v == -1 else v for k, v in sizes.items()}
    if int(np.prod(list(sizes.values()))) != devices:
        raise ConfigError(
            f"{given} does not cover {devices} device(s); the product must be {devices}"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Devices as [data, fsdp, tensor]; see `mesh_sizes`."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(config, len(devices))
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))


def constrain(mesh: Mesh | None, x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Say how an array lies inside a compiled step; without a mesh, or of one device, nothing.

    An axis that its mesh axes do not divide stays whole.
    """
    if mesh is None or mesh.size == 1:
        return x
    spec = [AT_USE.get(axis) for axis in axes]
    sizes = [
        np.prod([mesh.shape[a] for a in ((s,) if isinstance(s, str) else s or ())]) for s in spec
    ]
    spec = [s if n % size == 0 else None for s, n, size in zip(spec, x.shape, sizes, strict=True)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays, the same on every process, as global arrays; each process sends its own part."""

    def put(x: Any) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(np.asarray(jax.random.key_data(x))))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree)


def to_host(x: Any) -> np.ndarray:
    """All of an array on this host; every process asks, if it lies on the devices of several."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        sharding = x.sharding
        assert isinstance(sharding, NamedSharding), "a run's arrays lie on its mesh"
        x = jax.jit(lambda whole: whole, out_shardings=replicated(sharding.mesh))(x)  # type: ignore[arg-type]
    return np.asarray(x)


def own_mesh(mesh: Mesh) -> Mesh:
    """For what each process computes by itself: the mesh, or this process's devices of it."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(own) == mesh.size:
        return mesh
    return Mesh(np.asarray(own).reshape(1, -1, 1), mesh.axis_names)


def platform_of(mesh: Mesh | None) -> str:
    """What kind of devices a step runs on: those of its mesh, which need not be there."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def row_multiple(mesh: Mesh) -> int:
    """Rows of a micro-batch must be a multiple of this."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, leading: int = 2) -> NamedSharding:
    """Rows over data x fsdp, after `leading` whole axes ([updates, micros] of a packed batch)."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES))


def param_sharding(
    mesh: Mesh, name: str, shape: Sequence[int], axes: Sequence[str | None]
) -> NamedSharding:
    """Where a parameter lies, from its logical axes.

    Raises:
        ConfigError: When an axis does not divide, naming the parameter, the mesh axis and sizes.
    """
    spec: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        target = RULES[axis]
        if target is not None and size % mesh.shape[target]:
            fitting = [n for n in range(1, mesh.size + 1) if size % n == 0]
            raise ConfigError(
                f"mesh.{target}={mesh.shape[target]} does not divide axis '{axis}' of {name} "
                f"({size}); sizes that do: {fitting}"
            )
        spec.append(target)
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_shardings(
    mesh: Mesh, table: Iterable[tuple[tuple[str, ...], Sequence[int], Sequence[str | None]]]
) -> dict[str, Any]:
    """A nested dict of shardings from (path, shape, logical axes) of each parameter."""
    tree: dict[str, Any] = {}
    for path, shape, axes in table:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = param_sharding(mesh, "/".join(path), shape, axes)
    return tree
