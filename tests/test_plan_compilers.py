"""Plans by compilers, and against what a run on eight virtual devices allocates."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planning_for import MODEL, planned_config

from jaxrl.planner import StepMemory, Verdict, parse_target, plan_run, shapes_of
from jaxrl.planner.analytic import held
from jaxrl.planner.asking import environment, interpreter
from jaxrl.planner.run_shapes import bytes_a_device

ROOT = Path(__file__).parents[1]
CPU = parse_target("cpu:8")


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    """The small run by the CPU's compiler."""
    return plan_run(planned_config(), MODEL, CPU)


def of(verdict: Verdict, step: str) -> StepMemory:
    return {found.step: found for found in verdict.steps}[step]


def test_the_compilers_arguments_are_the_shards_added_up(verdict: Verdict):
    for step in verdict.steps:
        assert step.arguments == step.expected_arguments > 0
    state = bytes_a_device(shapes_of(planned_config(), MODEL, 8).state)
    assert of(verdict, "update").arguments > state  # and the batch
    sizes = verdict.held
    trees = sizes["policy parameters"] + sizes["value parameters"]
    assert trees < of(verdict, "score").arguments <= trees + sizes["packed batch"]


def test_the_whole_state_is_donated_and_nothing_else(verdict: Verdict):
    state = bytes_a_device(shapes_of(planned_config(), MODEL, 8).state)
    assert of(verdict, "update").aliased == state
    assert of(verdict, "score").aliased == 0


def test_logits_are_never_gathered(verdict: Verdict):
    for step in ("score", "update"):
        assert of(verdict, step).gathered_logits == ()


def test_collectives_are_counted(verdict: Verdict):
    score, update = ({c.kind: c for c in of(verdict, s).collectives} for s in ("score", "update"))
    # Each of 7 matrices of 4 layers is gathered, in 2 micro-batches of which an update has 1.
    assert score["all-gather"].executions >= 2 * 4 * 7
    assert update["all-gather"].executions >= 2 * 4 * 7
    assert update["all-gather"].executions > update["all-gather"].ops
    assert update["all-reduce"].bytes > 0


def test_no_verdict_is_given_for_devices_that_are_not_cpus(verdict: Verdict):
    assert verdict.fits is None and "says nothing about other devices" in verdict.reason
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


MORE = ("critic.kind=model", "algorithm.kl_in=report")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `planned_run` says."""
    folder = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("planned_run.py")), str(folder), *MORE],
        env=environment(CPU) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_gathered_logits_would_be_seen(found: dict[str, Any]):
    # A device has 1 of 4 rows of 16 positions, and 104 of 208 columns.
    assert found["gathered"]["columns"] == ["[1, 16, 208]"]
    assert found["gathered"]["rows"] == ["[4, 16, 104]"]
    assert found["gathered"]["kept"] == []


def test_a_run_holds_what_was_planned(found: dict[str, Any]):
    shapes = shapes_of(planned_config(*MORE), MODEL, 8)
    layout = shapes.layout
    assert found["layout"] == [layout.updates, layout.micros, layout.rows, layout.row_length]
    assert found["policy_length"] == layout.policy_length
    for name, size in held(shapes).items():
        assert name == "counters" or found[name] == [size] * 8, name


SMALL_GPU, SMALL_TPU = "cuda:h100:1x1x8", "tpu:v5e:2x4"
LONG = ("data.max_prompt_tokens=24", "rollout.max_new_tokens=1000", "packing.row_lengths=[1024]")


@pytest.mark.parametrize(
    ("target", "attention", "kernel"),
    [(SMALL_GPU, "blockwise", False), (SMALL_TPU, "splash", True)],
)
def test_four_layers_compile_for_accelerators_that_are_not_there(
    target: str, attention: str, kernel: bool, tmp_path: Path
):
    if not Path(os.environ.get("JAXRL_PLAN_VENV", ROOT / ".venv-plan")).exists():
        pytest.skip("no compilers for GPUs and TPUs here; scripts/make_env.sh plan installs them")
    config = planned_config(
        *LONG, "packing.micro_batch_tokens=4096", f"model.attention={attention}"
    )
    model = dataclasses.replace(MODEL, head_dim=128)
    found = plan_run(config, model, parse_target(target), steps=("update",), keep=tmp_path)
    update = of(found, "update")
    state = bytes_a_device(shapes_of(config, model, 8).state)
    assert update.arguments >= update.expected_arguments >= state
    assert update.aliased >= state and update.gathered_logits == ()
    assert found.fits is True and update.peak < 2**30
    assert update.source in found.target
    text = (tmp_path / "update.hlo").read_text(encoding="utf-8")
    # A TPU's kernel is a call; elsewhere blocks of scores, and never the square of a row.
    assert ("tpu_custom_call" in text) == kernel
    assert "1024,1024" not in text


def test_a_missing_environment_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAXRL_PLAN_VENV", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="scripts/make_env.sh plan"):
        interpreter(parse_target(SMALL_GPU))


def test_no_setting_of_the_outside_reaches_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/nowhere")
    for target, words in ((CPU, "count=8"), (parse_target(SMALL_GPU), "autotune_level=0")):
        given = environment(target)
        assert words in given["XLA_FLAGS"] and "nowhere" not in str(given)
    assert environment(parse_target(SMALL_TPU))["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
