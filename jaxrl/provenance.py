"""Where a result came from: versions of what computed it and the commit of the code."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["git_commit", "provenance", "versions"]

PACKAGES = ("jaxrl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of each package that decides the numbers, "unknown" if absent."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


@functools.cache
def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout, then "-dirty" if tracked files were changed; None outside one.

    Args:
        folder: a folder in the checkout; by default jaxrl's own if tracked, else the current one.
    """
    package = Path(__file__).resolve().parent
    if folder is None:
        tracked = _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is not None
        folder = package if tracked else Path.cwd()
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def provenance() -> dict[str, object]:
    """What a checkpoint and a run folder record about their origin."""
    return {"versions": versions(), "git_commit": git_commit()}


def _git(folder: Path, *arguments: str) -> str | None:
    """Git's answer, or None if there is no git, no checkout, or it takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
