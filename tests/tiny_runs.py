"""Whole runs of the tiny model in this process: settings, the run, what repeats of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.metrics import WALL_CLOCK, read_metrics
from jaxrl.setup import Run, build
from jaxrl.trainer import start, train

ROOT = Path(__file__).parents[1]
SMALL = [
    "iterations=3",
    "rollout.prompts=8",
    "rollout.samples=4",
    "rollout.batch_size=32",
    "packing.micro_batch_tokens=128",
    "data.eval.params={split: test, size: 32, length: 6}",
    "data.train.params={split: train, size: 40, length: 6}",
    "log.tensorboard=false",
    "log.progress=false",
    "eval.every=0",
    "checkpoint.export=false",
]
STEPS: dict[str, Any] = {}
"""Steps by the settings that they follow from, so that runs with the same ones trace them once."""


def configure(base: Path, run_dir: Path, *overrides: str, small: bool = True) -> Config:
    """`configs/tiny.yaml` on the model in `base`, smaller unless told otherwise."""
    settings = [f"run_dir={run_dir}", f"model.path={base}", "model.make=null"]
    return load_config([ROOT / "configs/tiny.yaml"], settings + SMALL * small + list(overrides))


def go(config: Config) -> dict[str, Any]:
    """Run in this process; the final state as NumPy leaves, and the metrics that repeat."""
    store = CheckpointStore(Path(config.run_dir) / "checkpoints", keep=config.checkpoint.keep)
    run = with_known_steps(build(config))
    try:
        state = train(run, store, start(run, store))
        leaves = jax.tree.map(np.asarray, state)
    finally:
        run.close()
        store.close()
    return {"state": leaves, "metrics": lasting_metrics(Path(config.run_dir))}


def with_known_steps(run: Run) -> Run:
    """The run with the steps of an earlier one that differs in nothing they are made from."""
    config, unread = run.config, Config()
    schedules = {config.optim.policy.schedule, config.optim.value.schedule}
    made_from = dataclasses.replace(
        config,
        **{name: getattr(unread, name) for name in ("run_dir", "seed", "data", "reward")},
        **{name: getattr(unread, name) for name in ("eval", "checkpoint", "log")},
        model=dataclasses.replace(config.model, path=""),
        iterations=0 if schedules == {"constant"} else config.iterations,
    )
    return dataclasses.replace(run, steps=STEPS.setdefault(repr(made_from), run.steps))


def lasting_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on machine and moment."""
    return [
        {k: v for k, v in row.items() if not k.startswith(WALL_CLOCK)}
        for row in read_metrics(run_dir)
    ]


def same(a: Any, b: Any) -> None:
    """Assert that two trees are equal to the bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
