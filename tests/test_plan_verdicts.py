"""Verdicts, what would make a plan fit, and the command."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from planning_for import MODEL, planned_config

from jaxrl.flops import iteration_flops, longest_flops
from jaxrl.planner import StepMemory, Verdict, parse_target, plan_run
from jaxrl.planner.analytic import allowance
from jaxrl.planner.remedies import find_remedies
from jaxrl.planner.report import plan_text
from jaxrl.planner.verdicts import judged
from jaxrl.types import Prompt, Trajectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import plan  # noqa: E402

EIGHT = parse_target("analytic:8")


def test_a_plan_fits_up_to_the_last_byte():
    needed = plan_run(planned_config(), MODEL, EIGHT).needed
    exact, less = (plan_run(planned_config(), MODEL, EIGHT, hbm=needed - off) for off in (0, 1))
    assert exact.fits is True and exact.remedies == ()
    assert less.fits is False and less.remedies
    unknown = plan_run(planned_config(), MODEL, EIGHT)
    assert unknown.fits is None and "--hbm" in unknown.reason


def test_every_remedy_is_the_plan_with_that_change():
    config = planned_config("packing.micro_batch_tokens=640", "model.remat=none")
    full = plan_run(config, MODEL, EIGHT).needed
    remedies = find_remedies(config, MODEL, 8, None, limit=full - full // 8)
    assert remedies and all(remedy.fits for remedy in remedies)
    named = [remedy.overrides[0].split("=")[0] for remedy in remedies]
    assert "packing.micro_batch_tokens" in named and "model.remat" in named
    # Cheapest first: smaller micro-batches before layers computed twice before more devices.
    assert named.index("packing.micro_batch_tokens") < named.index("model.remat")
    for remedy in remedies:
        devices = [int(word.split()[0]) for word in remedy.overrides if word.endswith("devices")]
        again = planned_config(
            "packing.micro_batch_tokens=640",
            "model.remat=none",
            *(word for word in remedy.overrides if "=" in word),
        )
        target = parse_target(f"analytic:{devices[0] if devices else 8}")
        assert plan_run(again, MODEL, target).needed == remedy.needed <= full - full // 8


def test_what_no_single_change_mends_is_mended_together_or_said_to_be_too_large():
    config = planned_config("packing.micro_batch_tokens=640", "model.remat=none")
    singles = find_remedies(config, MODEL, 8, None, limit=2**40)
    best = min(remedy.needed for remedy in singles)
    (together,) = find_remedies(config, MODEL, 8, None, limit=best - 1)
    assert together.fits and len(together.overrides) > 1
    (hopeless,) = find_remedies(config, MODEL, 8, None, limit=1)
    assert not hopeless.fits and hopeless.needed < best


def test_a_compilers_figure_scales_what_would_fit():
    config = planned_config("packing.micro_batch_tokens=640")
    limit = plan_run(config, MODEL, EIGHT).needed
    plain = find_remedies(config, MODEL, 8, None, limit)
    doubled = find_remedies(config, MODEL, 8, None, 2 * limit, scale=2.0)
    assert [2 * r.needed for r in plain] == pytest.approx([r.needed for r in doubled], abs=2)


def test_a_gpu_needs_room_that_no_compiler_counts():
    assert allowance("cuda", 20 * 2**30) == 2**30 + 3 * 2**29
    assert allowance("tpu", 20 * 2**30) == allowance(None, 2**40) == 0


STEP = StepMemory("update", "tpu", 4, 3, 7, 2, allowance=1)


def test_the_worst_step_decides_and_a_refusal_decides_first():
    score = dataclasses.replace(STEP, step="score", peak=1)
    assert judged((score, STEP), 10)[0] is True and judged((score, STEP), 9)[0] is False
    assert "the update step" in judged((score, STEP), 2**30)[1]
    # What libtpu 0.0.42 says of Qwen3-4B on tpu:v5e:2x2.
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (23.29G) exceeds available HBM (15.75G)."
    )
    refused = dataclasses.replace(STEP, refused=message)
    fits, reason = judged((score, refused), 2**40)
    assert (
        fits is False
        and "refuses the update step" in reason
        and "(23.29G) exceeds available HBM (15.75G)" in reason
    )
    on_cpu = dataclasses.replace(STEP, source="cpu")
    assert judged((on_cpu,), 1)[0] is None


def test_flops_of_the_longest_iteration_are_those_of_its_trajectories():
    config = planned_config("packing.share_prompts=true", "critic.kind=model", "rollout.prompts=1")
    prompt = Prompt(row=0, ids=(1,) * 10, text="", columns={})
    given = [
        Trajectory(
            prompt=prompt,
            sample=i,
            response_ids=(2,) * 7,
            logprobs=(0.0,) * 7,
            finish_reason="stop",
        )
        for i in range(2)
    ]
    counted = iteration_flops(config, MODEL, given)
    assert longest_flops(config, MODEL, 7) == pytest.approx(counted, rel=1e-12)
    assert longest_flops(config, MODEL) == longest_flops(config, MODEL, 30)


def test_seconds_are_flops_over_what_the_chips_reach():
    found = plan_run(planned_config(), MODEL, parse_target("analytic:v5e:8"), utilisation=0.5)
    assert found.seconds["update"] == found.flops["update"] / (8 * 197e12 * 0.5)
    assert set(found.seconds) == {"score", "update"}


def test_a_plan_is_read_by_people_and_programs():
    found = plan_run(planned_config(), MODEL, EIGHT, name="small", hbm=1)
    text = plan_text(found)
    for words in ("small, 44,384 parameters, on analytic:8", "fsdp 4, tensor 2", "does not fit"):
        assert words in text
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.to_json()["needed"] == found.needed


def test_the_command_plans_writes_and_tells_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    recipe = str(ROOT / "configs" / "qwen3_4b_dapo_sglang.yaml")
    kept = tmp_path / "plan.json"
    assert plan.main([recipe, "--target", "analytic:h100:8", "--json", str(kept)]) == 0
    assert "fits: the update step needs" in capsys.readouterr().out
    assert json.loads(kept.read_text(encoding="utf-8"))["fits"] is True
    assert plan.main([recipe, "--target", "analytic:8", "--hbm", "10GiB"]) == 2
    assert "would fit with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "tpu:v5e:8"), "ConfigError: target 'tpu:v5e:8'"),
        (("--target", "analytic:8", "--steps", "train"), "'train' is none of score, update"),
        (("mesh.tensor=16", "mesh.fsdp=1", "--target", "analytic:16"), "'kv_heads'"),
        (("model.path=models/unknown", "--target", "analytic:8"), "--model-config FILE"),
        (("--target", "analytic:8", "--hbm", "lots"), "write e.g. 80GiB"),
    ],
)
def test_the_command_refuses_with_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    assert plan.main([str(ROOT / "configs" / "qwen3_4b_dapo_sglang.yaml"), *arguments]) == 1
    found = capsys.readouterr()
    assert message in found.err and found.err.count("\n") == 1 and found.out == ""
