"""Five kills of a real run; `scripts/soak.sh` does fifty, and docs/soak.md is what they left."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.metrics import MetricsLog
from tests.checkpoint.states import numbered_state

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with the imports it has when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soak")


@pytest.mark.slow
def test_killed_five_times_a_run_ends_as_one_never_stopped(
    soak: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--kills", "5", "--iterations", "5", "--seed", "1", "--model", str(base)]
    assert soak.main([*command, "--out", str(tmp_path / "soak")]) == 0
    said = capsys.readouterr().out
    assert "All 5 kills: every run ended as the one never stopped." in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("| ")][1:] == [
        f"{kill}/5" for kill in range(1, 6)
    ]
    assert (tmp_path / "soak/soak.md").read_text().endswith("never stopped.\n")


def written(
    run: Path, *, step: int = 2, row: int = 3, score: float = 1.0, time: float = 1.0
) -> Path:
    """What a run leaves, with states that are made up."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    store.save(2, numbered_state(step), {"cursor": {"row": row}})
    store.close()
    log = MetricsLog(run)
    log.write(2, {"reward/mean": score, "time/iteration_s": time})
    log.samples(2, [{"prompt": "a", "score": score}])
    log.close()
    return run


def test_the_comparison_sees_every_part_and_leaves_out_the_clock(
    soak: ModuleType, tmp_path: Path
) -> None:
    one = written(tmp_path / "one")
    assert soak.differences(one, written(tmp_path / "later", time=9.0)) == []
    assert soak.differences(one, written(tmp_path / "row", row=4)) == ["cursor"]
    other = soak.differences(one, written(tmp_path / "score", score=1.0 + 1e-15))
    assert other == ["metrics.jsonl", "samples.jsonl"]
    arrays = soak.differences(one, written(tmp_path / "state", step=3))
    assert {"policy_params/kernel", "value_opt/kernel", "kl_coef"} <= set(arrays)
    more = written(tmp_path / "more")
    store = CheckpointStore(more / "checkpoints", keep=2)
    store.save(3, numbered_state(2), {"cursor": {"row": 3}})
    store.close()
    assert any("checkpoints" in line for line in soak.differences(one, more))


def test_damage_that_a_kill_leaves_is_no_whole_checkpoint(soak: ModuleType, tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    assert soak.newest(run) == 2
    (run / "checkpoints/00000002/host.json").write_text("{}")
    with pytest.raises(AssertionError, match="left damage behind.*host.json"):
        soak.newest(run)
