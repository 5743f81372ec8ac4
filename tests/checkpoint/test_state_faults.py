"""Checkpoints when something is wrong: full disks, damaged files, other models, kills."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxrl.checkpoint.state import FORMAT_VERSION, CheckpointStore
from jaxrl.errors import CheckpointError
from tests.checkpoint.states import (
    assert_same_bits,
    make_state,
    numbered_state,
    save,
)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


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
