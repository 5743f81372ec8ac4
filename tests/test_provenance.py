"""Versions and commit of what produced a result."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import jax

from jaxrl.provenance import git_commit, provenance, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["jax"] == jax.__version__
    assert all(isinstance(value, str) and value for value in found.values())
    assert set(provenance()) == {"versions", "git_commit"}


def test_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "First")
    git(tmp_path, "tag", "-a", "v1", "-m", "A tag must not take the commit's place")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40 and git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    git_commit.cache_clear()
    assert git_commit(tmp_path) == head + "-dirty"


def test_outside_a_checkout_there_is_none(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
