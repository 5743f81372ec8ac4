"""The manifest: what it says of a folder."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from jaxrl.checkpoint.whole import damage, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "deep" / "er" / "b").write_bytes(b"\0" * 5_000_000)
    (tmp_path / "empty").write_bytes(b"")
    write_manifest(tmp_path, {"step": 3})
    return tmp_path


def test_lists_every_file(folder: Path) -> None:
    assert read_manifest(folder) == {
        "step": 3,
        "files": {
            "a": {"bytes": 3, "crc32": zlib.crc32(b"abc")},
            "deep/er/b": {"bytes": 5_000_000, "crc32": zlib.crc32(b"\0" * 5_000_000)},
            "empty": {"bytes": 0, "crc32": 0},
        },
    }
    assert damage(folder) is None and damage(folder, contents=True) is None


def test_further_files_do_no_harm(folder: Path) -> None:
    (folder / "note.txt").write_text("a person's own")
    assert damage(folder, contents=True) is None


def test_sizes_are_seen_at_a_glance_and_contents_when_asked(folder: Path) -> None:
    (folder / "a").write_bytes(b"abd")
    assert damage(folder) is None
    assert "a has changed" in (damage(folder, contents=True) or "")
    (folder / "a").write_bytes(b"ab")
    assert "has 2 bytes instead of 3" in (damage(folder) or "")
    (folder / "a").unlink()
    assert "a is missing" in (damage(folder) or "")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b'{"files": 3}', b'{"files": {"a": 3}}']
)
def test_useless_manifest_means_not_whole(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    assert "manifest.json" in (damage(folder) or "")
