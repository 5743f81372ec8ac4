"""Every shipped config plans, and needs the memory that its head says; the table in the docs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jaxrl.config_io import load_config
from jaxrl.planner import find_model, parse_target, plan_run
from jaxrl.planner.table import table_text
from jaxrl.tiny import tiny_config

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TABLE = ROOT / "configs" / "models"
sys.path.insert(0, str(ROOT / "scripts"))
import plan as plan_script  # noqa: E402
import plan_table  # noqa: E402

GIB = 2**30


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_plans(file: Path, tmp_path: Path):
    before = [file.with_name("tiny.yaml")] if file.name.startswith("with_") else []
    config = load_config([*before, file])
    given = None
    if config.model.make:
        given = tmp_path / "config.json"
        given.write_text(json.dumps(tiny_config().to_hf()), encoding="utf-8")
    name, model = find_model(config, given, TABLE)
    head = file.read_text(encoding="utf-8")
    asked = re.search(rf"scripts/plan.py configs/{file.name} --target (\S+)", head)
    verdict = plan_run(config, model, parse_target(asked[1] if asked else "analytic:1"), name=name)
    assert verdict.needed > sum(verdict.held.values()) / 2 > 0
    if not asked:
        assert not re.search(r"(H100|TPU|GPUs)", head), "say what memory a device needs"
        return
    assert verdict.fits is True
    said = re.search(r"# Memory: +([\d.]+) GiB of ([\d.]+) a device \((.*)\), (\d+) GiB on", head)
    assert said is not None
    assert float(said[1]) == pytest.approx(verdict.needed / GIB, abs=0.06)
    assert float(said[2]) == pytest.approx((verdict.hbm or 0) / GIB, abs=0.06)
    steps = {name: float(size) for name, size in re.findall(r"(\w+) ([\d.]+)", said[3])}
    assert steps == {s.step: pytest.approx(s.needed / GIB, abs=0.06) for s in verdict.steps}
    assert float(said[4]) == pytest.approx(sum(verdict.host.values()) / GIB, abs=0.6)


def test_a_shape_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    recipe = [str(CONFIGS[0]), "--target", "analytic:1", "--model-config", "nowhere.json"]
    assert plan_script.main(recipe) == 1
    assert "nowhere.json: cannot be read" in capsys.readouterr().err


def test_the_table_in_the_docs_is_what_was_kept():
    kept = json.loads(plan_table.KEPT.read_text(encoding="utf-8"))
    assert set(kept) <= {case.command for case in plan_table.cases()} and len(kept) >= 8
    answers = list(plan_table.answers_of(kept))
    assert len(answers) == len(kept)
    assert table_text(answers) == plan_table.TABLE.read_text(encoding="utf-8")
    for answer in answers:
        estimates = {step.step: step for step in answer.estimated.steps}
        for step in answer.compiled.steps:
            assert step.refused is None and step.gathered_logits == (), answer.command
            assert estimates[step.step].arguments == step.expected_arguments
            assert estimates[step.step].peak == pytest.approx(step.peak, rel=0.2), answer.command
