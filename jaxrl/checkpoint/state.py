"""Training state on disk through Orbax: whole or absent, restored to the bit, pruned as one unit.

One checkpoint is one folder, named by its step:

    00000020/
      arrays/          every leaf of the TrainState (Orbax), with names like policy_params/embed
      host.json        data cursor, resolved config, seed, versions, commit: what is not an array
      manifest.json    format version, shapes, dtypes, sizes and checksums of files, the metric it
                       may be kept for; written last

Arrays are safe when `save` returns and are written in the background. What fails there is raised by
the next `save` (which saves all the same), `wait` or `close`; older checkpoints stay as they are.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.checkpoint.folders import (
    ARRAYS,
    FORMAT_VERSION,
    HOST,
    discard_left_overs,
    prune,
    publish,
    unfinished,
)
from jaxrl.checkpoint.leaves import local_bytes, named_leaves, spec
from jaxrl.checkpoint.measured import Measured
from jaxrl.checkpoint.reading import SavedStates
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.processes import ALONE, Peers
from jaxrl.provenance import provenance
from jaxrl.types import TrainState

__all__ = ["FORMAT_VERSION", "CheckpointStore"]

log = logging.getLogger(__name__)
_writing: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()


class CheckpointStore(SavedStates):
    """The checkpoints of one run, in a folder that all its processes see; any number may read.

    Each process of a run writes its part of the arrays; the first one makes folders and manifests.
    What is asked after a save waits for it, and sees it.
    """

    def __init__(self, folder: Path | str, *, keep: int, peers: Peers = ALONE) -> None:
        """Open `folder`, which need not exist yet.

        After a save the newest `keep` whole checkpoints remain, and the best that was measured.
        """
        if keep < 1:
            raise ConfigError(f"checkpoint.keep={keep} must be at least 1")
        super().__init__(folder, peers=peers)
        self.keep = keep
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def check_writable(self) -> None:
        """Write a file and remove it, so that a run that cannot save does not begin.

        Raises:
            CheckpointError: it cannot be done.
        """
        probe = self.folder / f".probe-{self._peers.index}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"0")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.folder}: {error}; make the folder "
                "writable, free space, or give another run_dir"
            ) from error

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        measured: Measured | None = None,
    ) -> None:
        """Write the checkpoint of `step`; returns once `state` may be donated or overwritten.

        Args:
            step: its name; the same step again replaces it.
            state: the arrays.
            host: finite JSON that `restore` gives back.
            measured: what it may be kept for: the best of a metric is never pruned.

        Raises:
            CheckpointError: `host` is not JSON, there is no room, or files cannot be written. The
                error of an earlier save is raised too, after this one has been started.
        """
        earlier = self._settled()
        leaves = named_leaves(state)
        host_text = self._host_text(host)
        built = unfinished(self.folder, step)
        self._peers.together(
            "a new checkpoint", lambda: self._begin(built, step, leaves, host_text)
        )
        try:
            self._files.save(built / ARRAYS, leaves)
        except Exception as error:
            raise self._failed(step, error) from error
        facts: dict[str, Any] = {"arrays": {name: spec(leaf) for name, leaf in leaves.items()}}
        if measured is not None:
            facts |= measured.to_manifest()
        self._writer = threading.Thread(
            target=self._finish, args=(step, facts), name="checkpoint-writer"
        )
        _writing.add(self)
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
            super().close()

    def _settle(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _settled(self) -> CheckpointError | None:
        """Wait for the writer; its failure, forgotten here so that it blocks nothing later."""
        self._settle()
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

    def _finish(self, step: int, facts: Mapping[str, Any]) -> None:
        """In the background: wait for Orbax, make the checkpoint whole, and only then prune."""
        try:
            self._files.wait()
            if self._peers.leads:
                publish(self.folder, step, facts)
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


def _finish_writing() -> None:
    """At the interpreter's end: let what was begun become whole."""
    for store in list(_writing):
        try:
            store.wait()
        except CheckpointError as error:
            log.error("%s", error)


# Orbax writes with the help of thread pools, which take no more work as soon as the main thread is
# at its end: `atexit`, or a thread that is no daemon, would come too late. What was registered last
# is called first, before those pools close.
threading._register_atexit(_finish_writing)  # pyright: ignore[reportAttributeAccessIssue]
