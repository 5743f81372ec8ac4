"""Training state on disk through Orbax: whole or absent, restored to the bit, pruned as one unit.

One checkpoint is one folder, named by its step:

    00000020/
      arrays/          every leaf of the TrainState (Orbax), with names like policy_params/embed
      host.json        data cursor, resolved config, seed, versions, commit: what is not an array
      manifest.json    format version, shapes, dtypes, sizes and checksums of files; written last

Arrays are safe when `save` returns and are written in the background. What fails there is raised by
the next `save` (which saves all the same), `wait` or `close`; older checkpoints stay as they are.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.checkpoint.folders import (
    FORMAT_VERSION,
    Found,
    discard_left_overs,
    prune,
    publish,
    scan,
    unfinished,
    whole,
)
from jaxrl.checkpoint.leaves import differences, local_bytes, named_leaves, nested, spec
from jaxrl.checkpoint.stream import cuts, stored_arrays
from jaxrl.checkpoint.whole import damage
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.processes import ALONE, Peers
from jaxrl.provenance import provenance
from jaxrl.types import TrainState

__all__ = ["FORMAT_VERSION", "CheckpointStore"]

ARRAYS, HOST = "arrays", "host.json"
log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, in a folder that all its processes see; any number may read.

    Each process of a run writes its part of the arrays; the first one makes folders and manifests.
    """

    def __init__(self, folder: Path | str, *, keep: int, peers: Peers = ALONE) -> None:
        """Open `folder`, which need not exist yet; `keep` whole checkpoints remain after a save."""
        if keep < 1:
            raise ConfigError(f"checkpoint.keep={keep} must be at least 1")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._peers = peers
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        )
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._passed_over: set[Path] = set()

    def save(self, step: int, state: TrainState, host: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`; returns once `state` may be donated or overwritten.

        Raises:
            CheckpointError: `host` is not JSON, there is no room, or files cannot be written. The
                error of an earlier save is raised too, after this one has been started.
        """
        earlier = self._settled()
        leaves = named_leaves(state)
        arrays = {name: spec(leaf) for name, leaf in leaves.items()}
        host_text = self._host_text(host)
        built = unfinished(self.folder, step)
        self._peers.together(
            "a new checkpoint", lambda: self._begin(built, step, leaves, host_text)
        )
        try:
            how = {name: ocp.SaveArgs(**cuts(name, *arrays[name])) for name in leaves}
            self._orbax.save(built / ARRAYS, args=ocp.args.PyTreeSave(leaves, save_args=how))
        except Exception as error:
            raise self._failed(step, error) from error
        # Not a daemon: an interpreter that ends in the middle waits for the checkpoint.
        self._writer = threading.Thread(
            target=self._finish, args=(step, arrays), name="checkpoint-writer"
        )
        self._writer.start()
        if earlier is not None:
            raise earlier

    def wait(self) -> None:
        """Block until the last save is whole on disk; raises what went wrong with it, once."""
        failure = self._settled()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the last save and let Orbax's threads go."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest save first."""
        return list(dict.fromkeys(one.step for one in reversed(self._whole())))

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, or None; warns once of a damaged one."""
        for path, reason in self.damaged().items():
            if path not in self._passed_over:
                self._passed_over.add(path)
                log.warning("passing over the checkpoint %s: %s", path, reason)
        return next((one.step for one in self._whole()), None)

    def damaged(self) -> dict[Path, str]:
        """Folders with a checkpoint's name that are not whole, each with the reason."""
        return {one.path: one.damage for one in self._scan() if one.damage}

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step`, to the bit, and the host part that was saved with it.

        Args:
            step: one of `steps()`.
            like: arrays or ShapeDtypeStructs; gives structure, shapes, dtypes and shardings. NumPy
                leaves come back as NumPy.

        Raises:
            CheckpointError: there is no whole checkpoint of that step, another format version wrote
                it, or its arrays are not those of `like` (all that differ are named).
        """
        found = self._open(step)
        wanted = named_leaves(like)
        self._check_same(found, {name: spec(leaf) for name, leaf in wanted.items()})
        arrays = self._read(found.path, {name: _kind(leaf) for name, leaf in wanted.items()})
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), self._host(found.path)

    def restore_policy(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The policy's parameters as nested dicts of NumPy arrays, and the host part."""
        return self._restore_part(step, "policy_params")

    def restore_critic(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The critic's own parameters (empty: it has none), likewise."""
        return self._restore_part(step, "value_params")

    def _restore_part(self, step: int, part: str) -> tuple[dict[str, Any], dict[str, Any]]:
        found = self._open(step)
        names = [name for name in found.manifest["arrays"] if name.startswith(f"{part}/")]
        if not names:
            return {}, self._host(found.path)
        arrays = self._read(
            found.path, {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        )
        return nested(arrays, part), self._host(found.path)

    def stored(self, step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Policy and critic (empty: there is none), to be read slice by slice, and the host part.

        Both are nested dicts of `StoredArray`.
        """
        found = self._open(step)
        parts = ("policy_params", "value_params")
        names = [name for name in found.manifest["arrays"] if name.split("/")[0] in parts]
        arrays = stored_arrays(found.path / ARRAYS, names)
        policy, critic = (nested(arrays, part) for part in parts)
        return policy, critic, self._host(found.path)

    def _scan(self) -> list[Found]:
        self._join()
        return scan(self.folder)

    def _whole(self) -> list[Found]:
        self._join()
        return whole(self.folder)

    def _join(self) -> None:
        """Wait for the writer; what is asked after a save sees that save."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _settled(self) -> CheckpointError | None:
        """Wait for the writer; its failure, forgotten here so that it blocks nothing later."""
        self._join()
        failure, self._failure = self._failure, None
        return failure

    def _host_text(self, host: Mapping[str, Any]) -> str:
        everything = {**provenance(), **host, "format_version": FORMAT_VERSION}
        try:
            return json.dumps(everything, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the host part of a checkpoint must be finite JSON: {error}; convert arrays with "
                ".tolist() and paths with str()"
            ) from error

    def _begin(self, built: Path, step: int, leaves: Mapping[str, Any], host_text: str) -> None:
        """All but the arrays; an error here is one on every process, before any writes a part."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._peers.leads:
                discard_left_overs(self.folder)
            self._check_room(leaves)
            if self._peers.leads:
                built.mkdir()
                (built / HOST).write_text(host_text, encoding="utf-8")
        except Exception as error:
            raise self._failed(step, error) from error

    def _check_room(self, leaves: Mapping[str, Any]) -> None:
        needed = sum(local_bytes(leaf) for leaf in leaves.values())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")

    def _finish(self, step: int, arrays: Mapping[str, Any]) -> None:
        """In the background: wait for Orbax, make the checkpoint whole, and only then prune."""
        try:
            self._orbax.wait_until_finished()
            if self._peers.leads:
                publish(self.folder, step, {"arrays": arrays})
        except Exception as error:
            self._failure = self._failed(step, error)
            return
        try:
            if self._peers.leads:
                prune(self.folder, self.keep)
        except OSError as error:
            log.warning("old checkpoints in %s could not be removed: %s", self.folder, error)

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        if self._peers.leads:
            shutil.rmtree(unfinished(self.folder, step), ignore_errors=True)
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {error}; older "
            "checkpoints there are untouched. Free space, make the folder writable, or set another "
            "run_dir, then resume"
        )

    def _open(self, step: int) -> Found:
        """The newest whole save of `step`, every byte of it checked."""
        found = next((one for one in self._whole() if one.step == step), None)
        if found is None:
            reasons = [one.damage for one in self._scan() if one.step == step and one.damage]
            raise self._missing(step, "; ".join(reasons))
        if found.version != FORMAT_VERSION:
            raise CheckpointError(
                f"{found.path} has checkpoint format {found.version}, this jaxrl reads format "
                f"{FORMAT_VERSION}; continue with the jaxrl that wrote it (its version stands in "
                f"{HOST} there), or start anew in another run_dir"
            )
        reason = damage(found.path, contents=True)
        if reason:
            raise self._missing(step, reason)
        return found

    def _missing(self, step: int, reason: str) -> CheckpointError:
        others = [other for other in self.steps() if other != step]
        rest = f"whole checkpoints are at {others}" if others else "there is no other whole one"
        if reason:
            return CheckpointError(
                f"the checkpoint of step {step} is damaged: {reason}; delete its folder to go on "
                f"without it ({rest})"
            )
        return CheckpointError(f"there is no checkpoint of step {step} in {self.folder}; {rest}")

    def _check_same(self, found: Found, wanted: Mapping[str, Any]) -> None:
        lines = differences(found.manifest["arrays"], wanted)
        if lines:
            shown = "\n  ".join(lines[:20] + [f"and {len(lines) - 20} more"] * (len(lines) > 20))
            raise CheckpointError(
                f"{found.path} was saved by a run with another model, critic or optimizer; use the "
                f"settings in its {HOST}, or another run_dir. These differ:\n  {shown}"
            )

    def _read(self, path: Path, kinds: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        request = ocp.args.PyTreeRestore(
            item={name: np.zeros(()) for name in kinds},  # only the names are looked at
            restore_args=dict(kinds),
            partial_restore=True,
        )
        try:
            return self._orbax.restore(path / ARRAYS, args=request)
        except Exception as error:
            raise CheckpointError(
                f"Orbax cannot read {path / ARRAYS}: {error}; delete {path} to go on without it"
            ) from error

    def _host(self, path: Path) -> dict[str, Any]:
        return json.loads((path / HOST).read_text(encoding="utf-8"))


def _kind(leaf: Any) -> ocp.RestoreArgs:
    """What Orbax shall make of a stored array so that it is like `leaf`."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)
