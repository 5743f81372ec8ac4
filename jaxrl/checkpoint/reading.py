"""What is in a folder of checkpoints: which are whole, newest, best; and their arrays back.

Reads only, so it may look into the folder of a run that goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxrl.checkpoint.arrays import ArrayFiles
from jaxrl.checkpoint.folders import ARRAYS, FORMAT_VERSION, HOST, Found, best, newest_first, scan
from jaxrl.checkpoint.leaves import differences, named_leaves, nested, spec
from jaxrl.checkpoint.measured import Measured
from jaxrl.checkpoint.stream import stored_arrays
from jaxrl.checkpoint.whole import damage
from jaxrl.errors import CheckpointError
from jaxrl.processes import ALONE, Peers
from jaxrl.types import TrainState

__all__ = ["SavedStates"]

log = logging.getLogger(__name__)


class SavedStates:
    """The checkpoints in a folder, for reading."""

    def __init__(self, folder: Path | str, *, peers: Peers = ALONE) -> None:
        """Open `folder`, which need not exist yet; all `peers` see the same one."""
        self.folder = Path(folder).absolute()
        self._peers = peers
        self._files = ArrayFiles()
        self._passed_over: set[Path] = set()
        self._contents: dict[tuple[Path, int], str | None] = {}

    def close(self) -> None:
        """Let Orbax's threads go."""
        self._files.close()

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, oldest save first."""
        return list(dict.fromkeys(one.step for one in reversed(self._whole())))

    def latest(self, *, contents: bool = False) -> int | None:
        """Step of the newest whole checkpoint, or None; warns once of a damaged one.

        With `contents` the first process reads every byte of it, so that what has changed on disk
        since it was written is passed over like what is missing.
        """
        found = self._whole()
        if contents and self._peers.leads:
            while found and found[0].version == FORMAT_VERSION and self._changed(found[0]):
                found = found[1:]
        for path, reason in self.damaged().items():
            if path not in self._passed_over:
                self._passed_over.add(path)
                log.warning("passing over the checkpoint %s: %s", path, reason)
        return found[0].step if found else None

    def best(self, up_to: int | None = None) -> tuple[int, Measured] | None:
        """Step and value of the best whole checkpoint, by the metric that was measured last.

        Args:
            up_to: look at no later step.
        """
        found = best([one for one in self._whole() if up_to is None or one.step <= up_to])
        return (found.step, found.measured) if found and found.measured else None

    def find(self, which: str) -> int:
        """The step that "latest", "best" or a number means.

        Raises:
            CheckpointError: there is none; says what there is.
        """
        if which.isdecimal():
            return int(which)
        if which not in ("latest", "best"):
            raise CheckpointError(f"{which!r} names no checkpoint; give latest, best or a step")
        known = self.best()
        step = self.latest() if which == "latest" else known and known[0]
        if step is not None:
            return step
        if steps := self.steps():
            raise CheckpointError(
                f"in {self.folder} none is the best: the run was not told a metric "
                f"(checkpoint.best) or has not measured it yet; give one of the steps {steps}"
            )
        damaged = "".join(f"\n  {path}: {reason}" for path, reason in self.damaged().items())
        raise CheckpointError(f"{self.folder} holds no whole checkpoint{damaged}")

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
        # One process reads every byte for all.
        self._peers.together("whether a checkpoint is whole", lambda: self._open(step).step)
        found = self._open(step)
        wanted = named_leaves(like)
        self._check_same(found, {name: spec(leaf) for name, leaf in wanted.items()})
        arrays = self._files.read(found.path / ARRAYS, wanted)
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), self._host(found.path)

    def restore_policy(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The policy's parameters as nested dicts of NumPy arrays, and the host part."""
        arrays, host = self.restore_named(step, "policy_params")
        return nested(arrays, "policy_params"), host

    def restore_critic(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The critic's own parameters (empty: it has none), likewise."""
        arrays, host = self.restore_named(step, "value_params")
        return nested(arrays, "value_params"), host

    def restore_named(self, step: int, part: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """NumPy arrays by name, of one field of the state or of all, and the host part."""
        found = self._open(step)
        names = [n for n in found.manifest["arrays"] if not part or n.startswith(f"{part}/")]
        arrays = self._files.read(found.path / ARRAYS, dict.fromkeys(names)) if names else {}
        return arrays, self._host(found.path)

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

    def _settle(self) -> None:
        """Wait until nothing is being written to the folder by this object."""

    def _scan(self) -> list[Found]:
        self._settle()
        known = self._contents
        return [
            replace(one, damage=one.damage or known.get((one.path, one.order)))
            for one in scan(self.folder)
        ]

    def _whole(self) -> list[Found]:
        return newest_first(self._scan())

    def _changed(self, one: Found) -> str | None:
        """What of a whole checkpoint is not what was written; its files are read once."""
        key = one.path, one.order
        if key not in self._contents:
            self._contents[key] = damage(one.path, contents=True)
        return self._contents[key]

    def _open(self, step: int) -> Found:
        """The newest whole save of `step`, every byte of it checked by the first process."""
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
        reason = self._changed(found) if self._peers.leads else None
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

    def _host(self, path: Path) -> dict[str, Any]:
        return json.loads((path / HOST).read_text(encoding="utf-8"))
