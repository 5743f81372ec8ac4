"""The checkpoint store: to the bit, whole or absent, and clear when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.checkpoint.state import FORMAT_VERSION, CheckpointStore
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.types import TrainState

policy_optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.linear_schedule(0.0, 1e-2, 10),
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    ),
)
value_optimizer = optax.adam(1e-2)


def make_state(seed: int, width: int = 4) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 3)
    policy = {
        "embed": jax.random.normal(keys[0], (8, width)),
        "layers": {"kernel": jax.random.normal(keys[1], (2, width, width)), "bias": jnp.zeros(3)},
    }
    value = {"value_head": {"kernel": jax.random.normal(keys[2], (width, 1)), "bias": jnp.zeros(1)}}
    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=policy_optimizer.init(policy),
        value_opt=value_optimizer.init(value),
        updates=jnp.int32(0),
        iteration=jnp.int32(0),
        kl_coef=jnp.float32(0.1),
        reward_moments=jnp.zeros(3),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


@partial(jax.jit, donate_argnums=0)
def train(state: TrainState) -> TrainState:
    """One update with made-up gradients that depend on everything, donating the state."""

    def moved(optimizer: Any, params: Any, opt: Any) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda x: jnp.sin(x + state.updates) * state.kl_coef, params)
        changes, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, changes), opt

    policy, policy_opt = moved(policy_optimizer, state.policy_params, state.policy_opt)
    value, value_opt = moved(value_optimizer, state.value_params, state.value_opt)
    return dataclasses.replace(
        state,
        policy_params=policy,
        policy_opt=policy_opt,
        value_params=value,
        value_opt=value_opt,
        updates=state.updates + 1,
        iteration=state.iteration + 1,
        kl_coef=state.kl_coef * 1.1,
    )


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def to_host(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: np.array(leaf), state)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with_close = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield with_close
    with_close.close()


def save(store: CheckpointStore, step: int, state: TrainState | None = None) -> None:
    store.save(step, state or make_state(step), {"cursor": {"epoch": 0, "row": step}})
    store.wait()


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


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
from tests.checkpoint.test_state import CheckpointStore, assert_same_bits, make_state
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


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint.keep=0"):
        CheckpointStore(tmp_path, keep=0)


class FullDisk:
    """Within it no file of this process grows past `limit` bytes: real writes fail half-way."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# After a failed write TensorStore still reports to Orbax's event loop, which is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", [200, 20_000])
def test_failed_save_leaves_the_old_one_and_blocks_nothing(tmp_path: Path, limit: int) -> None:
    """keep=1 and the second save fails half-way (CK-02); the third goes through (CK-05)."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    first, third = make_state(1, width=128), make_state(3, width=128)
    save(store, 1, first)
    with FullDisk(limit), pytest.raises(CheckpointError, match="step 2 could not be written"):
        save(store, 2, make_state(2, width=128))
    assert store.steps() == [1]
    assert_same_bits(store.restore(1, make_state(0, width=128))[0], first)
    assert [path.name for path in store.folder.iterdir()] == ["00000001"]
    save(store, 3, third)
    assert store.steps() == [3]
    assert_same_bits(store.restore(3, make_state(0, width=128))[0], third)
    store.close()


def test_failure_in_the_background_is_raised_once_and_the_next_save_still_happens(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl.checkpoint import folders

    save(store, 1)
    real = folders.write_manifest

    def disk_full(folder: Path, facts: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_manifest", disk_full)
    store.save(2, make_state(2), {})
    assert store.steps() == [1]
    monkeypatch.setattr(folders, "write_manifest", real)
    with pytest.raises(CheckpointError, match="step 2 could not be written.*No space left"):
        store.save(3, make_state(3), {})
    store.wait()
    assert store.steps() == [1, 3]


def test_no_room_is_said_before_anything_is_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="step 1 could not be written.*MB are free"):
        save(store, 1)
    assert list(store.folder.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run folder should be")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    with pytest.raises(CheckpointError, match="could not be written to .*run/checkpoints"):
        save(store, 1)
    assert store.latest() is None
    store.close()


def truncate(folder: Path) -> None:
    path = largest_file(folder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def delete(folder: Path) -> None:
    largest_file(folder).unlink()


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def half_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])


def no_host(folder: Path) -> None:
    (folder / "host.json").unlink()


@pytest.mark.parametrize("harm", [truncate, delete, no_manifest, half_manifest, no_host])
def test_damaged_checkpoint_is_passed_over_and_named(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, harm: Any
) -> None:
    save(store, 1)
    save(store, 2)
    harm(store.folder / "00000002")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == 1
        assert store.latest() == 1
    assert len(caplog.records) == 1 and "00000002" in caplog.text
    assert list(store.damaged()) == [store.folder / "00000002"]
    with pytest.raises(CheckpointError, match=r"step 2 is damaged.*00000002.*delete.*\[1\]"):
        store.restore(2, make_state(0))
    assert_same_bits(store.restore(1, make_state(0))[0], make_state(1))
    save(store, 2, make_state(5))  # the run goes on from 1 and comes to 2 again
    assert_same_bits(store.restore(store.latest() or 0, make_state(0))[0], make_state(5))
    save(store, 3)
    save(store, 4)
    assert not store.damaged()


def test_flipped_bit_is_found_when_restoring(store: CheckpointStore) -> None:
    save(store, 1)
    path = largest_file(store.folder / "00000001" / "arrays")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    for restore in (partial(store.restore, 1, make_state(0)), partial(store.restore_policy, 1)):
        with pytest.raises(CheckpointError, match="checksum differs"):
            restore()


def test_missing_step_says_which_there_are(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 5 in .*no other"):
        store.restore(5, make_state(0))
    save(store, 3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 in .*\[3\]"):
        store.restore_policy(5)


def test_other_format_version_is_refused_by_number(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.folder / "00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format_version": FORMAT_VERSION + 1}))
    assert store.latest() == 1  # not silently passed over: the run must not start anew
    with pytest.raises(CheckpointError, match=f"format {FORMAT_VERSION + 1}.*{FORMAT_VERSION};"):
        store.restore(1, make_state(0))
    with pytest.raises(CheckpointError, match="format"):
        store.restore_policy(1)
    for step in (2, 3, 4):
        save(store, step)
    assert store.steps() == [1, 3, 4]  # what another version wrote is not ours to remove


def test_another_model_is_refused_naming_what_differs(store: CheckpointStore) -> None:
    save(store, 1)
    like = make_state(0)
    policy = {
        "embed": jnp.zeros((8, 5)),
        "layers": {"kernel": like.policy_params["layers"]["kernel"].astype(jnp.bfloat16)},
        "head": jnp.zeros(2),
    }
    like = dataclasses.replace(like, policy_params=policy)
    with pytest.raises(CheckpointError) as caught:
        store.restore(1, like)
    lines = str(caught.value).splitlines()
    assert "another model" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "policy_params/embed: float32[8, 4] in the checkpoint, float32[8, 5] in this run",
        "policy_params/head: nothing in the checkpoint, float32[2] in this run",
        "policy_params/layers/bias: float32[3] in the checkpoint, nothing in this run",
        "policy_params/layers/kernel: float32[2, 4, 4] in the checkpoint, "
        "bfloat16[2, 4, 4] in this run",
    ]


def test_left_overs_of_a_killed_process_are_ignored_and_removed(store: CheckpointStore) -> None:
    save(store, 1)
    for name in (".unfinished-00000002", ".discarded-00000000"):
        shutil.copytree(store.folder / "00000001", store.folder / name)
    assert store.latest() == 1 and store.steps() == [1] and not store.damaged()
    save(store, 3)
    assert sorted(path.name for path in store.folder.iterdir()) == ["00000001", "00000003"]


def run_python(code: str, *arguments: str, flags: str = "") -> None:
    code = f"import os; os.environ['XLA_FLAGS'] = {flags!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def numbered_state(step: int) -> TrainState:
    """A state full of its step, made without compiling anything."""
    full = {"kernel": np.full((256, 64), step, np.float32)}
    counters = ("updates", "iteration", "kl_coef", "reward_moments", "skipped", "skipped_in_a_row")
    return TrainState(
        policy_params=full,
        value_params=full,
        policy_opt=full,
        value_opt=full,
        **{name: np.array(step, np.int32) for name in counters},
    )


def save_for_ever(folder: Path, saved: Any) -> None:
    """Body of a process that does nothing but save, one step after the other, keep=1."""
    store = CheckpointStore(folder, keep=1)
    step = store.latest() or 0
    while True:
        step += 1
        store.save(step, numbered_state(step), {"row": step})
        saved.release()


def test_killed_while_saving_there_is_always_a_whole_one(tmp_path: Path) -> None:
    """kill -9 at four moments; the next process goes on from what is there."""
    # A fork server imports JAX and Orbax once; each process starts from there in a moment.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    last = 0
    for delay in (0.0, 0.01, 0.03, 0.07):
        saved = processes.Semaphore(0)
        process = processes.Process(target=save_for_ever, args=(tmp_path, saved))
        process.start()
        for _ in range(3):
            assert saved.acquire(timeout=60)
        time.sleep(delay)
        process.kill()
        process.join()
        store = CheckpointStore(tmp_path, keep=1)
        step = store.latest()
        assert step is not None and step > last and not store.damaged()
        state, host = store.restore(step, numbered_state(0))
        assert host["row"] == step
        assert_same_bits(state, numbered_state(step))
        store.close()
        last = step
