"""A whole run that a reward model scores, with a critic that starts from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.errors import RewardError
from jaxrl.metrics import read_metrics
from jaxrl.setup import build
from jaxrl.trainer import start, train
from tests.classifiers import save_model, save_tokenizer

SETTINGS = [
    *("iterations=2", "rollout.prompts=2", "rollout.samples=2", "rollout.max_new_tokens=6"),
    *("rollout.batch_size=4", "data.max_prompt_tokens=16", "packing.row_lengths=[32]"),
    *("packing.micro_batch_tokens=64", "mesh.data=1", "log.progress=false"),
    *("log.tensorboard=false", "checkpoint.export=false", "critic.kind=model"),
    *("critic.keep_head=true", "optim.policy.lr=1e-3", "optim.value.lr=1e-3"),
]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("policy", "rm"):
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, kind="lm" if name == "policy" else "reward")
        save_tokenizer(tmp_path / name)
    for name in ("train", "eval"):
        rows = [{"prompt": f"{name} {i}"} for i in range(4)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    paths = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={tmp_path / 'policy'}",
        f"critic.path={tmp_path / 'rm'}",
        f"reward.models=[{{path: {tmp_path / 'rm'}, weight: 2.0}}]",
        f"data.train.path={tmp_path / 'train.jsonl'}",
        f"data.eval={{kind: file, path: {tmp_path / 'eval.jsonl'}}}",
    ]
    return load_config([], [*SETTINGS, *paths])


def go(config: Config) -> list[dict[str, Any]]:
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", keep=1)
    run = build(config)
    try:
        train(run, store, start(run, store))
    finally:
        run.close()
        store.close()
    return [row for row in read_metrics(config.run_dir) if "reward/mean" in row]


def test_a_run_is_scored_by_the_model_and_its_critic_starts_there(config: Config) -> None:
    rows = go(config)
    assert len(rows) == 2
    for row in rows:
        assert row["reward/mean"] == pytest.approx(2 * row["reward/model:rm"], rel=1e-5)
    assert rows[0]["reward/std"] > 1e-3
    assert abs(rows[0]["value/mean"]) > 1e-3  # not the zero of a fresh head
    assert rows[1]["updates/skipped"] == 0
    assert rows[0]["value/loss"] > 0


def test_prompts_that_the_model_cannot_read_are_found_at_the_start(
    config: Config, tmp_path: Path
) -> None:
    """In the held-out set too, which is scored only after the first iterations."""
    chat = [{"role": "user", "content": "abc"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": chat}) + "\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "plain"}) + "\n")
    config = replace(config, data=replace(config.data, chat=False))
    with pytest.raises(RewardError, match="row 0, prompt 'plain' is plain text"):
        build(config)
