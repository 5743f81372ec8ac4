"""The checkpoint folders of a run: which are there, which are whole, which go.

Names begin with a dot while a folder is being written or removed, so one rename puts a checkpoint
there and one takes it away. Saves are counted: after going back to an older step, the newest save
is still the newest, though its step is smaller.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.checkpoint.measured import Measured
from jaxrl.checkpoint.whole import damage, read_manifest, sync_folder, write_manifest

__all__ = [
    "ARRAYS",
    "FORMAT_VERSION",
    "HOST",
    "Found",
    "best",
    "discard_left_overs",
    "newest_first",
    "prune",
    "publish",
    "scan",
    "unfinished",
]

FORMAT_VERSION = 1
"""Raised whenever an older reader would misread a checkpoint."""

ARRAYS, HOST = "arrays", "host.json"
"""Within a checkpoint's folder."""
UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"


@dataclass(frozen=True)
class Found:
    """A folder with a checkpoint's name."""

    path: Path
    step: int
    manifest: Mapping[str, Any]
    """Empty if there is none that can be read."""
    damage: str | None
    """Why it is not whole, as far as sizes tell; None if it is."""

    @property
    def version(self) -> Any:
        """Format version."""
        return self.manifest.get("format_version", FORMAT_VERSION)

    @property
    def order(self) -> int:
        """Number of the save; larger is newer."""
        return int(self.manifest.get("order", 0))

    @property
    def measured(self) -> Measured | None:
        """What it may be kept for."""
        return Measured.in_manifest(self.manifest)


def scan(folder: Path) -> list[Found]:
    """Every checkpoint folder, whole or not, by name."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if path.name.split(".")[0].isdigit())
    return [_look(path) for path in sorted(named)]


def newest_first(found: Sequence[Found]) -> list[Found]:
    """The whole ones, newest save first."""
    whole = [one for one in found if not one.damage]
    return sorted(whole, key=lambda one: (one.order, one.step), reverse=True)


def best(found: Sequence[Found]) -> Found | None:
    """Of whole checkpoints, newest first, the best by the metric that was measured last.

    Of equal ones it is the oldest: a run keeps what nothing has beaten. Of several saves of a step
    the newest counts, which is the one that a step means.
    """
    chosen, value, seen = None, None, set[int]()
    for one in found:
        if one.step in seen or one.version != FORMAT_VERSION:
            continue
        seen.add(one.step)
        if one.measured and not (value and value.beats(one.measured)):
            chosen, value = one, one.measured
    return chosen


def unfinished(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is built."""
    return folder / f"{UNFINISHED}{step:08d}"


def publish(folder: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Give the finished but unpublished checkpoint of `step` its manifest and its name."""
    built = unfinished(folder, step)
    order = 1 + max((one.order for one in scan(folder)), default=0)
    head = {"format_version": FORMAT_VERSION, "step": step, "order": order}
    write_manifest(built, {**head, **facts})
    final = folder / f"{step:08d}"
    if final.exists():  # a folder cannot be replaced at one stroke: the older stays until pruned
        final = folder / f"{step:08d}.{order}"
    built.rename(final)
    sync_folder(folder)
    return final


def prune(folder: Path, keep: int) -> None:
    """Keep the best, and the newest save of each of the last `keep` steps; drop older ones.

    Damaged ones go with them, as soon as they are older than all the newest.
    """
    everything = scan(folder)
    found = [one for one in newest_first(everything) if one.version == FORMAT_VERSION]
    spared, kept = best(found), set[int]()
    for one in found:
        if one.step not in kept and len(kept) < keep:
            kept.add(one.step)
        elif one is not spared:
            _discard(one.path)
    for one in everything:
        if one.damage and kept and one.step < min(kept):
            _discard(one.path)


def discard_left_overs(folder: Path) -> None:
    """Remove what a killed process was writing or removing."""
    for kind in (UNFINISHED, DISCARDED):
        for path in folder.glob(kind + "*"):
            shutil.rmtree(path)


def _discard(path: Path) -> None:
    grave = path.with_name(DISCARDED + path.name)
    path.rename(grave)
    shutil.rmtree(grave)


def _look(path: Path) -> Found:
    manifest = read_manifest(path) or {}
    version = manifest.get("format_version", FORMAT_VERSION)
    return Found(
        path=path,
        step=int(path.name.split(".")[0]),
        manifest=manifest,
        # What another version counts as whole is for it to say; restoring refuses it by number.
        damage=damage(path) if version == FORMAT_VERSION else None,
    )
