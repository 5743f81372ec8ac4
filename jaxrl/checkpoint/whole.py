"""Is a folder a whole checkpoint? A manifest of sizes and checksums, written last, decides.

A checkpoint is built in a temporary folder, its manifest comes after every other file, and the
folder is then renamed. So a folder with a final name and files of the listed sizes is complete,
whatever happened to the process; the checksums tell what happened to the disk since.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST", "damage", "read_manifest", "sync_folder", "write_manifest"]

MANIFEST = "manifest.json"
PIECE = 1 << 22


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """List every file below `folder` with size and CRC-32, beside `facts`, and sync it to disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(_sync_and_sum, paths))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": crc}
        for path, crc in zip(paths, sums, strict=True)
    }
    for parent in {path.parent for path in paths}:
        sync_folder(parent)
    unfinished = folder / (MANIFEST + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({**facts, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none that can be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def damage(folder: Path, *, contents: bool = False) -> str | None:
    """Why `folder` is not a whole checkpoint, or None if it is.

    Args:
        folder: a checkpoint's folder.
        contents: compare checksums too, which reads every byte; otherwise only sizes.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder / MANIFEST} is missing or unreadable"
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys() for entry in files.values()
    ):
        return f"{folder / MANIFEST} does not list files with bytes and crc32"
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if size != entry["bytes"]:
            return f"{folder / name} has {size} bytes instead of {entry['bytes']}"
    if contents:
        with ThreadPoolExecutor(2) as pool:
            try:
                sums = list(pool.map(_sum, (folder / name for name in files)))
            except OSError as error:
                return f"{folder} cannot be read: {error}"
        for (name, entry), crc in zip(files.items(), sums, strict=True):
            if crc != entry["crc32"]:
                return f"{folder / name} has changed since it was written (checksum differs)"
    return None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(path: Path, *, sync: bool = False) -> int:
    crc = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc


def _sync_and_sum(path: Path) -> int:
    return _sum(path, sync=True)
