"""Runs on a disk that fails them: they go on from what is whole, or stop and say what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl import commands
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.errors import CheckpointError
from jaxrl.metrics import read_metrics, read_samples
from tests.checkpoint.test_state_faults import FullDisk, delete, largest_file, truncate
from tests.tiny_runs import configure, go, same

SETTINGS = ("critic.kind=head", "iterations=4", "checkpoint.every=1", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and outcome of a run that nothing happens to, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, go(configure(base, folder, *SETTINGS))


def stopped_at(whole: Path, run: Path, step: int) -> Path:
    """A copy of the run as it was when `step` had just been saved, but for later lines."""
    shutil.copytree(whole, run)
    for later in range(step + 1, 5):
        shutil.rmtree(run / f"checkpoints/{later:08d}")
    return run / f"checkpoints/{step:08d}"


def flip(folder: Path) -> None:
    path = largest_file(folder / "arrays")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def ends_like(run: Path, outcome: dict[str, Any], whole: tuple[Path, dict[str, Any]]) -> None:
    same(outcome["state"], whole[1]["state"])
    assert outcome["metrics"] == whole[1]["metrics"]
    assert read_samples(run) == read_samples(whole[0])


@pytest.mark.parametrize("harm", [delete, truncate, flip])
def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(
    base: Path,
    tmp_path: Path,
    whole: tuple[Path, dict[str, Any]],
    harm: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    harm(stopped_at(whole[0], run, 3))
    outcome = go(configure(base, run, *SETTINGS))
    assert "going on from iteration 2 of 4" in capsys.readouterr().out
    assert "passing over the checkpoint" in caplog.text and "00000003" in caplog.text
    ends_like(run, outcome, whole)


# After a failed write TensorStore still reports to Orbax's event loop, which is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up_stops_the_run_which_then_goes_on(
    base: Path, tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    run = tmp_path / "run"
    stopped_at(whole[0], run, 2)
    config = configure(base, run, *SETTINGS)
    with (
        FullDisk(100_000),
        pytest.raises(CheckpointError, match="step [34] could not be written.*Free space.*resume"),
    ):
        go(config)
    # The save of 4 tells of it, after the lines of 4: whoever goes on from a checkpoint has its
    # lines.
    assert read_metrics(run)[-1]["step"] == 4
    store = CheckpointStore(run / "checkpoints", keep=9)
    assert store.steps() == [1, 2] and not store.damaged()
    store.close()
    ends_like(run, go(config), whole)


@pytest.mark.parametrize("harm", [delete, truncate, flip])
def test_with_nothing_whole_left_the_run_says_what_is_broken(
    base: Path,
    tmp_path: Path,
    whole: tuple[Path, dict[str, Any]],
    harm: Callable[[Path], None],
) -> None:
    run = tmp_path / "run"
    harm(stopped_at(whole[0], run, 1))
    before = read_metrics(run)
    with pytest.raises(CheckpointError, match="no whole checkpoint; 00000001: .*remove what is"):
        commands.run(configure(base, run, *SETTINGS))
    assert read_metrics(run) == before


def test_a_folder_that_cannot_be_written_stops_the_run_before_it_begins(
    base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot be written to .*run/checkpoints.*run_dir"):
        commands.run(configure(base, run, *SETTINGS))
    assert [path.name for path in run.iterdir()] == ["checkpoints"]
    # Not even root may write there.
    with pytest.raises(CheckpointError, match="run_dir=/proc/run cannot be made"):
        commands.run(configure(base, Path("/proc/run"), *SETTINGS))
