"""Whole runs of the tiny model: learning, exact first ratio, resume to the bit, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from jaxrl import commands
from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.errors import CheckpointError, ConfigError, DataError, RewardError, TrainingError
from jaxrl.metrics import read_metrics, read_samples
from jaxrl.models import ModelConfig
from scripts import train as train_script
from tests.tiny_runs import ROOT, configure, go, same


@pytest.mark.parametrize("critic", ["model", "head"])
def test_first_ratio_is_exactly_one_and_everything_is_recorded(
    base: Path, tmp_path: Path, critic: str
):
    """On one CPU device in float32, with the checkpoint-wrapped forward both passes share."""
    config = configure(base, tmp_path, f"critic.kind={critic}", "algorithm.updates=2")
    result = go(config)
    for row in result["metrics"][1:]:
        assert row["first_update/ratio_mean"] == 1.0
        assert row["first_update/logprob_diff_max"] == 0.0
        assert row["first_update/clip_fraction"] == 0.0
        assert row["rollout/logprob_diff_max"] < 1e-4  # sampler against trainer, same weights
        assert 0.0 < row["packing/efficiency"] <= 1.0
        assert row["updates/skipped"] == 0.0
    assert result["metrics"][1]["value/mean"] == 0.0  # the head starts at exactly zero
    assert result["metrics"][2]["value/mean"] != 0.0
    wanted = {
        *("policy/loss", "policy/ratio_mean", "policy/ratio_min", "policy/ratio_max"),
        *("policy/clip_fraction_up", "policy/clip_fraction_down", "policy/approx_kl_k1"),
        *("policy/approx_kl_k3", "policy/entropy", "policy/grad_norm", "policy/lr", "value/loss"),
        *("value/mean", "value/return_mean", "value/explained_variance", "value/clip_fraction"),
        *("value/grad_norm", "value/lr", "rollout/response_length", "reward/mean", "eval/score"),
        *("rollout/logprob_diff_mean", "rollout/truncated_fraction", "packing/efficiency"),
    }
    assert wanted <= set(result["metrics"][3])
    timed = read_metrics(tmp_path)[2]
    phases = {"rollout", "scoring", "pack", "score", "advantage", "update", "publish"}
    assert {f"time/{name}_s" for name in phases} <= set(timed)
    assert timed["speed/model_flops_per_s"] > 0 and timed["compilations"] >= 4
    assert len([r for r in read_samples(tmp_path) if r["step"] == 2 and not r.get("held_out")]) == 4


CARRIED = [
    *("iterations=7", "checkpoint.every=5", "critic.warmup_iterations=2"),
    *("algorithm.kl_in=reward", "algorithm.kl_target=0.01", "algorithm.kl_horizon=100"),
    *("optim.policy.schedule=linear", "optim.policy.warmup_steps=3"),
    *("reward.normalise=mean_std", "algorithm.truncated=bootstrap"),
]
"""With something of everything that one iteration hands to the next."""


@pytest.fixture(scope="module")
def carried(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and outcome of a run that is never stopped; others only read them."""
    folder = tmp_path_factory.mktemp("carried") / "run"
    return folder, go(configure(base, folder, *CARRIED))


def test_rs01_a_resumed_run_equals_one_never_stopped(
    base: Path, tmp_path: Path, carried: tuple[Path, dict[str, Any]]
):
    """RS-01, RS-02, RS-04, RS-06, RS-07, RS-10: parameters, moments, rates, prompts, KL, seeds.

    40 prompts and 8 an iteration: the stop after iteration 5 is at the end of an epoch.
    """
    folder, whole = carried
    # The same run, killed after iteration 5's checkpoint (its later files are removed).
    shutil.copytree(folder, tmp_path / "cut")
    store = CheckpointStore(tmp_path / "cut/checkpoints", keep=2)
    assert store.steps() == [5, 7]
    store.close()
    shutil.rmtree(next(p for p in (tmp_path / "cut/checkpoints").iterdir() if "7" in p.name))
    resumed = go(configure(base, tmp_path / "cut", *CARRIED))
    same(resumed["state"], whole["state"])
    assert resumed["metrics"] == whole["metrics"]
    coefficients = [row["kl/coef"] for row in whole["metrics"][1:]]
    assert len(set(coefficients)) > 1  # the adaptive coefficient moved, and was carried over
    scored = np.asarray(whole["state"].reward_moments)[0]
    assert scored == 7 * 32  # so were the moments of the scores: all iterations are counted
    assert whole["metrics"][-1]["kl/reference"] != 0.0


def test_critic_warm_up_leaves_the_policy_alone(carried: tuple[Path, dict[str, Any]]):
    rows = carried[1]["metrics"][1:]
    assert [row["policy/lr"] > 0 for row in rows] == [False] * 2 + [True] * 5
    assert [row["value/lr"] > 0 for row in rows] == [True] * 7
    # What samples iteration i + 1 is what iteration i left: the reference itself, so far.
    assert [row["kl/reference"] for row in rows[:3]] == [0.0] * 3
    assert rows[3]["kl/reference"] != 0.0


def test_the_same_seed_repeats_and_another_does_not(base: Path, tmp_path: Path):
    runs = {
        name: go(configure(base, tmp_path / name, f"seed={seed}"))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    same(runs["a"]["state"], runs["b"]["state"])
    assert runs["a"]["metrics"] == runs["b"]["metrics"]
    assert runs["a"]["metrics"][2] != runs["c"]["metrics"][2]


def test_a_reported_kl_changes_nothing_and_an_unmeasured_one_is_not_recorded(
    base: Path, tmp_path: Path
):
    off = go(configure(base, tmp_path / "off"))
    on = go(configure(base, tmp_path / "on", "algorithm.kl_in=report"))
    same(off["state"].policy_params, on["state"].policy_params)
    assert not any(name.startswith("kl/") for row in off["metrics"] for name in row)
    assert on["metrics"][1]["kl/reference"] == 0.0 != on["metrics"][3]["kl/reference"]


def test_grpo_needs_no_critic(base: Path, tmp_path: Path):
    config = configure(base, tmp_path, "algorithm.advantage_mode=grpo")
    result = go(config)
    assert result["state"].value_params == {}
    assert result["metrics"][-1]["first_update/ratio_mean"] == 1.0


def test_nf02_non_finite_updates_stop_the_run_and_leave_a_finite_checkpoint(
    base: Path, tmp_path: Path
):
    options = ("optim.policy.lr=1e38", "optim.policy.max_grad_norm=0", "checkpoint.every=1")
    config = configure(base, tmp_path, "iterations=20", "critic.kind=head", *options)
    with pytest.raises(TrainingError, match="3 updates in a row.*max_skipped_in_a_row=3"):
        go(config)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    latest = store.latest()
    assert latest is not None and latest < 20
    store.close()
    assert read_metrics(tmp_path)[-1]["updates/skipped"] >= 3


def write_functions(folder: Path) -> None:
    (folder / "my_rewards.py").write_text(
        "import math, os, time\n"
        "def short(completions, **kw): return [1.0]\n"
        "def raises(completions, **kw): raise ValueError('boom')\n"
        "def nans(completions, **kw): return [math.nan] * len(completions)\n"
        "def some(completions, **kw):\n"
        "    return [math.nan if i % 3 == 0 else float(i % 2) for i in range(len(completions))]\n"
        "def lengths(completions, **kw): return [float(len(c)) for c in completions]\n"
    )


BAD = {
    "rollout.promts=3": (ConfigError, "rollout.promts.*prompts"),
    "iterations=ten": (ConfigError, "iterations"),
    "packing.micro_batch_tokens=8": (ConfigError, "packing.micro_batch_tokens"),
    "packing.row_lengths=[8]": (ConfigError, "packing.row_lengths"),
    "algorithm.updates=5": (ConfigError, "algorithm.updates"),
    "mesh.tensor=3": (ConfigError, "mesh.tensor=3"),
    "data.train={kind: file, path: nowhere.jsonl, name: null, params: {}}": (
        DataError,
        "nowhere.jsonl",
    ),
    "data.chat=true": (DataError, "chat template"),
    "reward.functions=[{fn: no_such_module:f}]": (RewardError, r"reward.functions\[0\].fn"),
    "reward.functions=[{fn: my_rewards:short}]": (RewardError, "my_rewards:short.*1"),
    "reward.functions=[{fn: my_rewards:raises}]": (RewardError, "boom"),
    "critic.path=nowhere": (Exception, "nowhere"),
    "resume=must": (CheckpointError, "resume=must"),
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_stops_before_any_compute(
    base: Path, tmp_path: Path, override: str, monkeypatch: pytest.MonkeyPatch
):
    write_functions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    kind, message = BAD[override]
    with pytest.raises(kind, match=message):
        commands.run(configure(base, tmp_path / "run", override))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_rw03_invalid_rewards_can_be_dropped_and_are_counted(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_functions(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["reward.on_invalid=drop"]
    some = go(configure(base, tmp_path / "a", "reward.functions=[{fn: my_rewards:some}]", *options))
    assert [row["reward/invalid"] for row in some["metrics"][1:]] == [11.0] * 3
    everything = go(
        configure(base, tmp_path / "b", "reward.functions=[{fn: my_rewards:nans}]", *options)
    )
    config = ModelConfig.from_hf(load_hf_config(base))
    same(everything["state"].policy_params, load_params(base, config))
    assert int(everything["state"].skipped) == 0


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts/train.py"), str(config), *overrides]


def written(config: Config, path: Path) -> Path:
    from jaxrl.config_io import save_config

    save_config(config, path)
    return path


def test_ck06_sigterm_saves_the_last_finished_iteration(base: Path, tmp_path: Path):
    options = ("iterations=2000", "critic.kind=head", "checkpoint.every=0", "log.progress=true")
    path = written(configure(base, tmp_path / "run", *options), tmp_path / "config.yaml")
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command(path), stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.time() + 240
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 4:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 3, (tmp_path / "log").read_text()
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=2)
    assert store.latest() == read_metrics(tmp_path / "run")[-1]["step"] >= 3
    store.close()
    assert "the same command goes on from there" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("while_waiting_for", ["a reward", "the held-out rewards"])
def test_ck06_a_signal_ends_a_long_wait_at_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_waiting_for: str
):
    """The reward function hangs in iteration 2, or in the evaluation after it."""
    held_out = while_waiting_for != "a reward"
    (tmp_path / "slow_rewards.py").write_text(
        "import os, signal, time\n"
        "calls = 0\n"
        "def score(completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"  # the probe, held-out 0, iterations 1 and 2, held-out 2
        f"    if calls == {5 if held_out else 4}:\n"
        f"        os.kill({os.getpid()}, signal.SIGTERM)\n"
        "        time.sleep(300)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = configure(
        *(base, tmp_path / "run", "eval.every=2", "checkpoint.every=0"),
        *("reward.functions=[{fn: slow_rewards:score}]", "reward.timeout_s=600"),
    )
    begun = time.monotonic()
    result = go(config)
    assert time.monotonic() - begun < 200
    done = 2 if held_out else 1
    assert int(result["state"].iteration) == done
    assert [row["step"] for row in result["metrics"]] == list(range(done + 1))
    assert "policy/loss" in result["metrics"][-1]
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=2)
    assert store.latest() == done
    store.close()


def test_the_command_line_trains_exports_and_evaluates(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = ("critic.kind=head", "checkpoint.export=true", "log.progress=true")
    path = written(configure(base, tmp_path / "run", *options), tmp_path / "config.yaml")

    def call(*flags: str) -> str:
        assert train_script.main([str(path), *flags]) == 0
        return capsys.readouterr().out

    dry = call("--dry-run")
    assert "nothing was trained" in dry and not (tmp_path / "run/checkpoints").exists()
    done = subprocess.run(command(path), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out score  before" in done.stdout and "iter 3/3" in done.stdout
    for name in (
        *("curves.png", "config.yaml", "metrics.jsonl", "provenance.jsonl"),
        "export/model.safetensors",
    ):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert load_config([tmp_path / "run/config.yaml"]) == load_config([path])
    answer = call("--eval")
    score = read_metrics(tmp_path / "run")[-1]["eval/score"]
    assert f"eval/score {score:.4g}" in answer and "iteration 3" in answer
    assert yaml.safe_load(call("--print-config", "seed=3"))["seed"] == 3
    # The export is a Hugging Face model that says what the policy says.
    again = go(configure(tmp_path / "run/export", tmp_path / "again"))
    assert again["metrics"][0]["eval/score"] == pytest.approx(score)


def test_a_wrong_key_on_the_command_line_exits_with_one_line(tmp_path: Path):
    done = subprocess.run(
        command(ROOT / "configs/tiny.yaml", "optim.policy.learning_rate=1"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ") and "optim.policy" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_ppo_learns(base: Path, tmp_path: Path):
    """configs/tiny.yaml itself, 15 iterations: sampled accuracy rises by at least half again."""
    config = configure(base, tmp_path, "iterations=15", "log.tensorboard=false", small=False)
    rows = go(config)["metrics"][1:]
    rewards = [row["reward/mean"] for row in rows]
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert last > first + 0.1 and last > 1.5 * first, rewards
    assert json.dumps(rows[-1])  # every metric is a plain number
