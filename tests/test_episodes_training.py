"""Whole runs with an environment: what is trained on, what is evaluated, what a person reads."""

from __future__ import annotations

import shutil
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.errors import ConfigError, DataError, RewardError
from jaxrl.metrics import WALL_CLOCK, read_metrics, read_samples
from jaxrl.setup import build
from jaxrl.trainer import start, train
from tests.rollout.sglang.models import make_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-qwen3") / "model")


def configure(model: Path, run_dir: Path, *overrides: str) -> Config:
    settings = [
        f"run_dir={run_dir}",
        f"model.path={model}",
        "model.make=null",
        "critic.kind=head",
        "data.chat=true",
        "data.train.params={split: train, size: 12, length: 6}",
        "data.eval.params={split: test, size: 3, length: 6}",
        "data.max_prompt_tokens=24",
        "reward.functions=[]",
        "rollout.env=playing:odd",
        "rollout.max_turns=2",
        "rollout.max_turn_tokens=8",
        "rollout.max_new_tokens=48",
        "rollout.prompts=4",
        "rollout.samples=4",
        "rollout.dynamic_sampling=true",
        f"rollout.stop_token_ids={[2, *range(10, 500, 6)]}",
        "algorithm.updates=1",
        "iterations=3",
        "packing.micro_batch_tokens=576",
        "packing.row_lengths=[144]",
        "eval.every=1",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "log.tensorboard=false",
        "log.progress=false",
    ]
    return load_config([ROOT / "configs/tiny.yaml"], [*settings, *overrides])


def go(config: Config) -> list[dict[str, Any]]:
    """Run; the metrics that machine and moment have no part in."""
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", keep=9)
    with closing(store), closing(build(config)) as run:
        train(run, store, start(run, store))
    rows = read_metrics(config.run_dir)
    return [{k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)} for row in rows]


def test_a_run_of_episodes_and_its_resumption(model: Path, tmp_path: Path):
    config = configure(model, tmp_path / "run")
    rows = go(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["first_update/ratio_mean"] == 1.0
        assert row["rollout/logprob_diff_max"] < 1e-4  # of the policy's tokens alone
        assert row["rollout/rounds"] >= 1.0 and row["reward/std"] > 0.0
        assert row["updates/skipped"] == 0.0 and row["policy/grad_norm"] > 0.0
    assert rows[0]["eval/turns"] > 1.0 and rows[-1]["eval/prompts"] == 3.0
    samples = read_samples(config.run_dir)
    for row in samples:
        assert 1 <= row["turns"] <= 2
        # The whole episode: the environment's part stands in it, with the template around it.
        assert row["completion"].count("tool: and\nassistant:") == row["turns"] - 1
    trained = [row for row in samples if not row.get("held_out")]
    assert {row["weight_version"] for row in trained} == {0, 1, 2}
    resumed = tmp_path / "resumed"  # as a kill after the second iteration would have left it
    shutil.copytree(config.run_dir, resumed)
    for path in (resumed / "checkpoints").iterdir():
        if path.name.split(".")[0] == "3":
            shutil.rmtree(path)
    assert go(configure(model, resumed)) == rows


def test_what_cannot_work_is_found_before_anything_runs(model: Path, tmp_path: Path):
    def refused(kind: type[Exception], said: str, *overrides: str) -> None:
        with pytest.raises(kind, match=said):
            build(configure(model, tmp_path / "run", *overrides))

    refused(
        ConfigError, "rollout.env='playing:nobody' cannot be used", "rollout.env=playing:nobody"
    )
    refused(ConfigError, "must be an async function", "rollout.env=playing:not_async")
    refused(DataError, "row 0: .* missing .*'answers'", "rollout.env=playing:needs_answers")
    forgetful = "{% for m in messages[-1:] %}{{ m.content }}{% endfor %}"
    refused(DataError, "the chat template cannot go on", f'data.chat_template="{forgetful}"')
    refused(RewardError, "nowhere", "reward.functions=[{fn: nowhere:score}]")
    left = [thread.name for thread in threading.enumerate() if thread.name == "environment"]
    assert not left  # what was started has been ended
