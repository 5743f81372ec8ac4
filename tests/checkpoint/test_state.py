"""The checkpoint store: to the bit, onto other devices, the last ones kept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.checkpoint.state import FORMAT_VERSION, CheckpointStore
from jaxrl.errors import CheckpointError, ConfigError
from tests.checkpoint.states import (
    assert_same_bits,
    make_state,
    save,
    to_host,
    train,
)


def test_stopped_and_resumed_equals_uninterrupted(store: CheckpointStore) -> None:
    """Moments, counts, schedules and the KL coefficient go on where they were (RS-01, -02, -06)."""
    state = make_state(0)
    for _ in range(4):
        state = train(state)
    resumed = make_state(0)
    for _ in range(2):
        resumed = train(resumed)
    save(store, 2, resumed)
    resumed, _ = store.restore(2, make_state(99))
    assert float(resumed.kl_coef) == float(np.float32(0.1) * np.float32(1.1) * np.float32(1.1))
    for _ in range(2):
        resumed = train(resumed)
    assert_same_bits(resumed, state)
    assert int(optax.tree.get(resumed.value_opt, "count")) == 4


def test_every_bit_pattern_and_dtype_survives(store: CheckpointStore) -> None:
    state = make_state(0)
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    policy = {"odd": jnp.asarray(odd), "half": jnp.array([1.5, -0.0], jnp.bfloat16)}
    state = dataclasses.replace(state, policy_params=policy, updates=jnp.int32(2**31 - 1))
    save(store, 1, state)
    restored, _ = store.restore(1, jax.tree.map(jnp.zeros_like, state))
    assert_same_bits(restored, state)


def test_the_state_may_be_donated_as_soon_as_save_returns(store: CheckpointStore) -> None:
    big = make_state(1, width=512)
    expected = to_host(big)
    store.save(1, big, {})
    for _ in range(3):
        big = train(big)
    jax.block_until_ready(big)
    store.wait()
    assert_same_bits(store.restore(1, expected)[0], expected)


def test_restores_onto_another_sharding_from_shapes_alone(store: CheckpointStore) -> None:
    state = make_state(3)
    save(store, 3, state)
    where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("fsdp",)), PartitionSpec())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state)
    restored, _ = store.restore(3, like)
    assert_same_bits(restored, state)
    assert all(leaf.sharding == where for leaf in jax.tree.leaves(restored))
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert_same_bits(store.restore(3, bare)[0], state)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxrl.checkpoint.state import CheckpointStore
from tests.checkpoint.states import assert_same_bits, make_state
devices = np.array(jax.devices())
assert devices.size == 4
def shardings(mesh, name):
    def one(leaf):
        axes = [name if i == leaf.ndim - 1 and size % 4 == 0 else None
                for i, size in enumerate(leaf.shape)]
        return NamedSharding(mesh, P(*axes))
    return jax.tree.map(one, make_state(5))
state = jax.device_put(make_state(5), shardings(Mesh(devices, ("fsdp",)), "fsdp"))
assert not state.policy_params["embed"].is_fully_replicated
store = CheckpointStore(sys.argv[1], keep=1)
store.save(5, state, {})
two = Mesh(devices.reshape(2, 2), ("data", "tensor"))
where = shardings(two, "tensor")
like = jax.tree.map(lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w), state, where)
store.wait()
restored, _ = store.restore(5, like)
assert_same_bits(restored, state)
assert restored.policy_params["embed"].sharding == where.policy_params["embed"]
store.close()
"""


def test_four_devices_save_and_other_meshes_restore(tmp_path: Path) -> None:
    """Saved sharded over four devices; restored over 2 x 2 there, and on one device here."""
    run_python(SHARDED, str(tmp_path), flags="--xla_force_host_platform_device_count=4")
    store = CheckpointStore(tmp_path, keep=1)
    assert_same_bits(store.restore(5, make_state(0))[0], make_state(5))
    store.close()


def test_host_part_comes_back_with_its_origin(store: CheckpointStore) -> None:
    host = {"cursor": {"epoch": 1, "row": 7}, "seed": 0, "config": {"optim": {"lr": 1e-5}}}
    store.save(7, make_state(7), host)
    store.wait()
    _, back = store.restore(7, make_state(0))
    assert {key: back[key] for key in host} == host
    assert back["format_version"] == FORMAT_VERSION
    assert back["versions"]["jax"] == jax.__version__
    assert set(back["versions"]) >= {"python", "flax", "optax", "orbax-checkpoint", "transformers"}
    assert "git_commit" in back


def test_host_part_must_be_json(store: CheckpointStore) -> None:
    for wrong in ({"cursor": np.zeros(2)}, {"best": float("nan")}):
        with pytest.raises(CheckpointError, match="finite JSON"):
            store.save(1, make_state(1), wrong)
    assert store.steps() == []


def test_policy_alone_needs_no_state(store: CheckpointStore) -> None:
    save(store, 4)
    policy, host = store.restore_policy(4)
    assert_same_bits(policy, to_host(make_state(4)).policy_params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(policy))
    assert host["cursor"]["row"] == 4


def test_keeps_the_last_ones(store: CheckpointStore) -> None:
    assert store.latest() is None and store.steps() == []
    for step in (10, 20, 30):
        save(store, step)
    assert store.steps() == [20, 30] and store.latest() == 30
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000020", "00000030"]


def test_same_step_again_replaces_it(store: CheckpointStore) -> None:
    save(store, 10, make_state(1))
    save(store, 10, make_state(2))
    assert store.steps() == [10]
    assert_same_bits(store.restore(10, make_state(0))[0], make_state(2))
    assert len(list(store.folder.iterdir())) == 1


def test_after_going_back_the_newest_save_is_the_latest(store: CheckpointStore) -> None:
    save(store, 30)
    save(store, 40)
    save(store, 35)  # restored at 30 by hand, then saved
    assert store.latest() == 35 and store.steps() == [40, 35]
    save(store, 40, make_state(1))
    assert store.latest() == 40 and store.steps() == [35, 40]
    assert_same_bits(store.restore(40, make_state(0))[0], make_state(1))


def test_what_is_asked_after_a_save_sees_it(store: CheckpointStore) -> None:
    store.save(1, make_state(1), {})
    assert store.latest() == 1
    store.save(2, make_state(2), {})
    assert store.steps() == [1, 2]
    store.save(3, make_state(3), {})
    assert_same_bits(store.restore(3, make_state(0))[0], make_state(3))


ENDS = """
import sys
from jaxrl.checkpoint.state import CheckpointStore
from tests.checkpoint.states import make_state
store = CheckpointStore(sys.argv[1], keep=1)
store.save(7, make_state(7, width=512), {})
raise SystemExit("the end")
"""


def test_an_interpreter_that_ends_waits_for_what_it_saves(tmp_path: Path) -> None:
    """Nobody waits for the store or closes it; thread pools, which Orbax needs, are still there."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines() == ["the end"]
    store = CheckpointStore(tmp_path, keep=1)
    assert_same_bits(store.restore(7, make_state(0, width=512))[0], make_state(7, width=512))
    store.close()


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint.keep=0"):
        CheckpointStore(tmp_path, keep=0)


def run_python(code: str, *arguments: str, flags: str = "") -> None:
    code = f"import os; os.environ['XLA_FLAGS'] = {flags!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
