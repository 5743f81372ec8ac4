"""Whole runs whose rollouts come from a real server: in step, ahead, resumed, cut off."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import load_config, save_config
from jaxrl.errors import RolloutError
from jaxrl.metrics import WALL_CLOCK, read_metrics, read_samples
from jaxrl.rollouts import Rollouts
from jaxrl.setup import Run, build
from jaxrl.trainer import start, train
from jaxrl.types import Trajectory
from tests.rollout.sglang.faulty import FaultyProxy
from tests.rollout.sglang.servers import RunningServer

ROOT = Path(__file__).parents[3]
REWARDS = (
    # Hardly ever all alike: without spread nothing is learnt, and the weights stay as they are.
    "def odd(completions, **columns):\n"
    "    return [sum(ord(c) % 2 for c in text) / (len(text) + 1) for text in completions]\n"
)


@pytest.fixture(autouse=True)
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))


def configure(model: Path, url: str, run_dir: Path, *overrides: str) -> Config:
    settings = [
        f"run_dir={run_dir}",
        f"model.path={model}",
        "model.make=null",
        "critic.kind=head",
        "data.train.params={split: train, size: 12, length: 6}",
        "data.eval=null",
        "data.max_prompt_tokens=12",
        "reward.functions=[{fn: odd_rewards:odd}]",
        "rollout.engine=sglang",
        f"rollout.urls=[{url}]",
        "rollout.health_timeout_s=8",
        "rollout.gone_timeout_s=60",
        "rollout.prompts=4",
        "rollout.samples=4",
        "rollout.max_new_tokens=8",
        "algorithm.updates=1",
        "optim.policy.lr=1e-3",
        "packing.micro_batch_tokens=384",
        "packing.row_lengths=[96]",
        "eval.every=0",
        "checkpoint.every=0",
        "checkpoint.keep=9",
        "log.tensorboard=false",
        "log.progress=false",
    ]
    return load_config([ROOT / "configs/tiny.yaml"], [*settings, *overrides])


class Spied:
    """An engine that notes what is asked, what is answered, and with which weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asked: list[list[tuple[int, int, int, int]]] = []  # (row, epoch, sample, seed)
        self.said: list[list[Trajectory]] = []
        inner = engine._requests

        def requests(*arguments: Any) -> Any:
            made = inner(*arguments)
            self.asked.append([(r.prompt.row, r.prompt.epoch, r.sample, r.seed) for r in made])
            return made

        engine._requests = requests

    def generate(self, *arguments: Any, **keywords: Any) -> list[Trajectory]:
        got = self.engine.generate(*arguments, **keywords)
        self.said.append(got)
        return got

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclasses.dataclass
class Done:
    state: Any
    metrics: list[dict[str, Any]]
    spy: Spied


def go(config: Config, *, greedy: bool = False, watch: Callable[[Run], None] | None = None) -> Done:
    """Run in this process. `greedy` is refused by the settings: nothing would be learnt from it."""
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep)
    run = build(config)
    spy = Spied(run.engine)
    sampling = dataclasses.replace(run.sampling, temperature=0.0) if greedy else run.sampling
    rollouts = Rollouts(
        config,
        spy,  # type: ignore[arg-type]
        run.cursor,
        sampling,
        run.score,
        run.stage,
    )
    run = dataclasses.replace(run, engine=spy, rollouts=rollouts)  # type: ignore[arg-type]
    try:
        if watch:
            watch(run)
        state = train(run, store, start(run, store))
        leaves = jax.tree.map(np.asarray, state)
    finally:
        run.close()
        store.close()
    rows = [
        {k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)}
        for row in read_metrics(config.run_dir)
    ]
    return Done(leaves, rows, spy)


def keep_until(config: Config, step: int, run_dir: Path) -> None:
    """A copy of a run as a kill after the checkpoint of `step` would have left it."""
    shutil.copytree(config.run_dir, run_dir)
    for path in (run_dir / "checkpoints").iterdir():
        if path.name.split(".")[0].isdigit() and int(path.name.split(".")[0]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("mode", ["gae", "grpo"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_both_modes_train_in_step_and_ahead(
    server: RunningServer, tiny_model: Path, tmp_path: Path, mode: str, staleness: int
):
    options = [f"algorithm.advantage_mode={mode}", f"rollout.max_staleness={staleness}"]
    if staleness:
        options += ["algorithm.importance=token"]
    done = go(configure(tiny_model, server.url, tmp_path / "run", "iterations=5", *options))
    rows = done.metrics[1:]
    assert len(rows) == 5 and int(done.state.iteration) == 5
    for i, row in enumerate(rows):
        assert row["first_update/ratio_mean"] == 1.0  # old log-probabilities are the trainer's
        assert row["rollout/staleness_max"] <= min(i, staleness)
        assert row["rollout/too_old"] == row["rollout/left_out"] == row["updates/skipped"] == 0.0
        if not staleness:
            assert row["rollout/logprob_diff_max"] < 1e-4  # server against trainer
    if staleness:
        assert max(row["rollout/staleness_max"] for row in rows) >= 1
        # Older weights said it: the difference from the trainer's is real, and known.
        assert rows[-1]["rollout/logprob_diff_max"] > 1e-4
    rows_asked = [[a[0] for a in batch[::4]] for batch in done.spy.asked]
    assert all(len(batch) == 16 for batch in done.spy.asked)
    assert sorted(sum(rows_asked[:3], [])) == list(range(12))  # an epoch: each once


def test_old_logprobs_may_be_the_servers(server: RunningServer, tiny_model: Path, tmp_path: Path):
    options = ("algorithm.old_logprobs=rollout", "rollout.max_staleness=1", "iterations=3")
    done = go(configure(tiny_model, server.url, tmp_path / "run", *options))
    differences = [row["first_update/logprob_diff_max"] for row in done.metrics[1:]]
    assert all(row["reward/std"] > 0.0 for row in done.metrics[1:])
    assert 0.0 < differences[0] < 1e-4  # the server's own rounding
    for row, difference in zip(done.metrics[1:], differences, strict=True):
        assert difference > (1e-4 if row["rollout/staleness_max"] else 0.0)  # weights moved on


def test_a_resumed_greedy_run_equals_one_never_stopped(
    server: RunningServer, tiny_model: Path, tmp_path: Path
):
    """Prompts, token ids and metrics; the parameters follow."""
    config = configure(
        tiny_model, server.url, tmp_path / "whole", "iterations=5", "checkpoint.every=2"
    )
    whole = go(config, greedy=True)
    keep_until(config, 2, tmp_path / "cut")
    again = go(dataclasses.replace(config, run_dir=str(tmp_path / "cut")), greedy=True)
    assert again.spy.asked == whole.spy.asked[2:]
    for batch, earlier in zip(again.spy.said, whole.spy.said[2:], strict=True):
        assert [t.response_ids for t in batch] == [t.response_ids for t in earlier]
        assert [t.weight_version for t in batch] == [t.weight_version for t in earlier]
    for row, earlier in zip(again.metrics, whole.metrics, strict=True):
        assert row.keys() == earlier.keys()
        for name in row.keys() - {"compilations"}:
            np.testing.assert_allclose(row[name], earlier[name], atol=1e-4, err_msg=name)
    for ours, theirs in zip(
        jax.tree.leaves(again.state), jax.tree.leaves(whole.state), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_sampling_run_asks_the_same_of_the_same_versions(
    server: RunningServer, tiny_model: Path, tmp_path: Path, staleness: int
):
    """The CPU server draws as it likes; what is asked for is the run's."""
    config = configure(
        tiny_model,
        server.url,
        tmp_path / "whole",
        *("iterations=7", "checkpoint.every=3", f"rollout.max_staleness={staleness}"),
        "algorithm.importance=token",
    )
    whole = go(config)
    keep_until(config, 3, tmp_path / "cut")
    again = go(dataclasses.replace(config, run_dir=str(tmp_path / "cut")))
    assert sorted(again.spy.asked) == sorted(whole.spy.asked[3:])
    ages = [row["rollout/staleness_max"] for row in whole.metrics[1:]]
    assert [row["rollout/staleness_max"] for row in again.metrics[4:]] == ages[3:]
    assert ages == ([0.0] * 7 if not staleness else [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0])


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.url) as faulty:
        yield faulty


@pytest.mark.parametrize("staleness", [0, 1])
def test_all_servers_gone_leaves_a_checkpoint_to_go_on_from(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path, staleness: int
):
    """In the middle of a run: one clear error, nothing lost; the same command goes on."""
    options = (
        *("iterations=6", "rollout.gone_timeout_s=4", "rollout.health_timeout_s=4"),
        *(f"rollout.max_staleness={staleness}", "algorithm.importance=token"),
    )
    config = configure(tiny_model, proxy.url, tmp_path / "run", *options)

    def cut_off_after_three(run: Run) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 120
            while len(read_metrics(config.run_dir)) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            proxy.down = True

        threading.Thread(target=wait, daemon=True).start()

    with pytest.raises(RolloutError, match="no usable server"):
        go(config, watch=cut_off_after_three)
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=2)
    saved = store.latest()
    store.close()
    assert saved is not None and 3 <= saved < 6
    proxy.down = False
    done = go(config)
    assert int(done.state.iteration) == 6
    steps = [row["step"] for row in done.metrics]
    assert steps == list(range(7))
    whole = go(dataclasses.replace(config, run_dir=str(tmp_path / "whole")))
    asked = {tuple(batch) for batch in whole.spy.asked[saved:]}
    assert {tuple(batch) for batch in done.spy.asked} == asked  # no prompt lost, none repeated


def test_colocated_servers_rest_while_the_trainer_works(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path
):
    """Emptied when idle, then memory out; back in the order weights, update, cache."""
    config = configure(
        tiny_model,
        proxy.url,
        tmp_path / "run",
        *("iterations=2", "rollout.colocated=true", f"rollout.publish_dir={tmp_path / 'shm'}"),
    )
    done = go(config)
    assert int(done.state.iteration) == 2
    interesting = {
        "/generate": "generate",
        "/flush_cache": "flush",
        "/release_memory_occupation": "release",
        "/resume_memory_occupation": "resume",
        "/update_weights_from_disk": "update",
    }
    calls: list[str] = []
    for asked in proxy._asked:
        name = interesting.get(asked.path)
        if name == "resume":
            name = f"resume {asked.body['tags'][0]}"
        if name and (not calls or calls[-1] != name):
            calls.append(name)
    once = ["flush", "release", "resume weights", "update", "resume kv_cache", "generate"]
    # Rollouts of two iterations, each followed by a rest; probes are calls of generate as well.
    assert calls == ["update", "generate", *once, *once]
    assert not any((tmp_path / "shm").iterdir())


def test_both_engines_give_the_same_update(server: RunningServer, tiny_model: Path, tmp_path: Path):
    """The command of the README on the tiny Qwen3: three rounds of update and publish."""
    config = configure(tiny_model, server.url, tmp_path / "run", "rollout.prompts=6")
    save_config(config, tmp_path / "compare.yaml")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/compare_rollouts.py"), str(tmp_path / "compare.yaml")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "run/compare_rollouts.json").read_text())
    assert [(row["round"], row["engine"]) for row in rows] == [
        (number, engine) for number in (1, 2, 3) for engine in ("sglang", "trainside")
    ]
    for row in rows:
        assert row["same_tokens"] == 1.0 and row["logprob_diff_mean"] < 1e-4
        assert row["grad_norm"] > 0.1
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        assert ours["ratio_mean"] == 1.0
        assert abs(theirs["loss"] - ours["loss"]) < 1e-4
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert len({row["loss"] for row in rows[1::2]}) == 3  # the weights moved
    assert (tmp_path / "run/compare_rollouts.md").read_text().strip() in done.stdout


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_of_episodes(
    staleness: int, server: RunningServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Each turn is asked for from the server, and what it said last is what is trained on."""
    ahead = ["algorithm.importance=token"] if staleness else []
    config = configure(
        tiny_model,
        server.url,
        tmp_path / "run",
        "reward.functions=[]",
        "rollout.env=playing:odd",
        "rollout.max_turns=2",
        "rollout.max_turn_tokens=8",
        "rollout.max_new_tokens=48",
        "rollout.dynamic_sampling=true",
        f"rollout.stop_token_ids={[2, *range(10, 500, 6)]}",
        f"rollout.max_staleness={staleness}",
        "data.chat=true",
        "data.max_prompt_tokens=24",
        "data.eval={kind: python, name: jaxrl.tasks:reverse_letters}",
        "data.eval.params={split: test, size: 3, length: 6}",
        "packing.micro_batch_tokens=576",
        "packing.row_lengths=[144]",
        "eval.every=3",
        "iterations=3",
        *ahead,
    )
    done = go(config)
    assert [row["step"] for row in done.metrics] == [0, 1, 2, 3]
    for row in done.metrics[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-4 or row["rollout/staleness_max"] > 0
        assert row["first_update/ratio_mean"] == 1.0
        assert row["reward/std"] > 0.0 and row["updates/skipped"] == 0.0
        assert row["rollout/staleness_max"] <= staleness
    assert done.metrics[0]["eval/turns"] > 1.0
    samples = read_samples(config.run_dir)
    for row in samples:
        assert row["completion"].count("tool: and\nassistant:") == row["turns"] - 1
    assert {row["turns"] for row in samples} - {1} == {2}
    # Whether a batch that may be ahead is, a busy machine decides.
    ages = {r["step"] - 1 - r["weight_version"] for r in samples if not r.get("held_out")}
    assert ages <= set(range(staleness + 1))
