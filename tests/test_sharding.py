"""Meshes and the rules from logical axes to mesh axes, with errors that name what fits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxrl.config import MeshConfig
from jaxrl.errors import ConfigError
from jaxrl.sharding import batch_sharding, make_mesh, param_sharding, row_multiple, tree_shardings


class Device:
    """Stands for a device in the arithmetic of sizes; nothing is placed on it."""

    def __init__(self, number: int) -> None:
        self.id, self.process_index, self.platform = number, 0, "cpu"


def sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    mesh = make_mesh(config, [Device(i) for i in range(devices)])
    return dict(mesh.shape)


def test_minus_one_takes_what_is_left():
    assert sizes(MeshConfig(), 1) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert sizes(MeshConfig(data=2, fsdp=-1, tensor=2), 8) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3, fsdp=1), "mesh.data=3, mesh.fsdp=1, mesh.tensor=1.*8 device"),
        (MeshConfig(data=-1, fsdp=-1), "at most one"),
        (MeshConfig(data=0), "at least 1"),
        (MeshConfig(tensor=3), "mesh.tensor=3.*8 device"),
    ],
)
def test_sizes_that_do_not_cover_the_devices_are_named(config: MeshConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        sizes(config, 8)


def test_me02_an_axis_that_does_not_divide_names_parameter_axis_and_sizes():
    mesh = make_mesh(MeshConfig(fsdp=4), [Device(i) for i in range(4)])
    with pytest.raises(ConfigError, match=r"mesh.fsdp=4.*'embed' of mlp/up \(10\).*\[1, 2\]"):
        param_sharding(mesh, "mlp/up", (10, 8), ("embed", "mlp"))


def test_parameters_and_rows_lie_where_the_rules_say():
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    tree = tree_shardings(
        mesh,
        [
            (("embed", "weight"), (8, 4), ("vocab", "embed")),
            (("layers", "q"), (2, 4, 2, 2), ("layers", "embed", "heads", "head_dim")),
            (("norm",), (4,), (None,)),
        ],
    )
    assert tree["embed"]["weight"].spec == PartitionSpec("tensor", "fsdp")
    assert tree["layers"]["q"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert tree["norm"].spec == PartitionSpec(None)
    assert batch_sharding(mesh).spec == PartitionSpec(None, None, ("data", "fsdp"))


def test_rows_are_a_multiple_of_the_batch_axes():
    assert row_multiple(AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))) == 8  # type: ignore[arg-type]
