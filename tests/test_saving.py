"""Which iterations a run saves: those that are due, and the best; and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config_io import load_config
from jaxrl.errors import ConfigError
from jaxrl.metrics import read_metrics
from jaxrl.processes import ALONE
from jaxrl.progress import Progress
from jaxrl.saving import Saver
from tests.checkpoint.states import numbered_state
from tests.tiny_runs import configure, go, same

SCORE = "checkpoint.best=eval/score"


class Counted(CheckpointStore):
    """A real store that remembers what it was asked to save."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, keep=1)
        self.asked: list[int] = []

    def save(self, step: int, *rest: Any) -> None:
        self.asked.append(step)
        super().save(step, *rest)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Counted]:
    store = Counted(tmp_path / "checkpoints")
    yield store
    store.close()


def saver(store: CheckpointStore, *overrides: str, first: int = 0) -> Saver:
    run: Any = SimpleNamespace(config=load_config([], ["iterations=100", *overrides]), peers=ALONE)
    return Saver(run, store, Progress(100, enabled=False), first)


def finish(saver: Saver, values: dict[int, float | None], name: str = "eval/score") -> None:
    """Iterations with a value of the metric, None: it was not measured."""
    for step, value in values.items():
        measured = {} if value is None else {name: value}
        saver.finished(numbered_state(step), {"row": step}, {"policy/tokens": 9.0} | measured)


def test_the_best_is_saved_though_nothing_is_due_and_only_once_if_both(counted: Counted) -> None:
    finish(
        saver(counted, SCORE, "checkpoint.every=4"),
        {1: 0.3, 2: 0.2, 3: 0.4, 4: 0.5, 5: 0.5, 6: math.nan, 7: None, 8: 0.1, 9: math.inf},
    )
    assert counted.asked == [1, 3, 4, 8]
    known = counted.best()
    assert known is not None and (known[0], known[1].value) == (4, 0.5)
    assert counted.steps() == [4, 8]  # keep=1, and the best


def test_the_smaller_the_better_if_so_asked(counted: Counted) -> None:
    options = (SCORE, "checkpoint.best_mode=min", "checkpoint.every=0")
    finish(saver(counted, *options), {1: 0.3, 2: 0.4, 3: 0.2})
    assert counted.asked == [1, 3] and counted.find("best") == 3


def test_without_a_metric_only_what_is_due_is_saved(counted: Counted) -> None:
    finish(saver(counted, "checkpoint.every=2"), {1: 0.3, 2: 0.4, 3: 0.9})
    assert counted.asked == [2] and counted.best() is None


def test_a_run_that_goes_on_knows_the_best_so_far(counted: Counted) -> None:
    finish(saver(counted, SCORE, "checkpoint.every=3"), {1: 0.3, 2: 0.7, 3: 0.1})
    finish(saver(counted, SCORE, "checkpoint.every=0", first=3), {4: 0.6, 5: 0.7, 6: 0.8})
    assert counted.asked == [1, 2, 3, 6]


def test_what_comes_after_the_resumed_iteration_is_no_competitor(counted: Counted) -> None:
    """It went on from 1 because 2 and 3 were damaged then; 3 would repeat itself unsaved."""
    counted.keep = 3
    finish(saver(counted, SCORE, "checkpoint.every=1"), {1: 0.3, 2: 0.1, 3: 0.7})
    finish(saver(counted, SCORE, "checkpoint.every=0", first=1), {2: 0.1, 3: 0.7})
    assert counted.asked == [1, 2, 3, 3]


def test_the_last_one_is_saved_with_its_value_unless_it_is_there(counted: Counted) -> None:
    one = saver(counted, SCORE, "checkpoint.every=0")
    finish(one, {1: 0.5, 2: 0.4})
    state = jax.device_put(numbered_state(2))
    assert one.last(state, {}, {"eval/score": 0.4})
    assert one.last(state, {}, {"eval/score": 0.4})
    assert counted.asked == [1, 2]
    assert counted.find("best") == 1 and counted.latest() == 2
    state.policy_params["kernel"].delete()  # as by an update that was given it
    assert not one.last(state, {}, {})


@pytest.mark.parametrize(
    ("name", "metrics", "message"),
    [
        ("eval/scor", {"eval/score": 1.0}, "eval/scor is not measured.*did you mean eval/score"),
        ("reward/x", {"policy/tokens": 1.0, "time/a_s": 1.0}, r"reward/x is .*are: policy/tokens$"),
    ],
)
def test_a_metric_that_nothing_measures_is_refused(
    counted: Counted, name: str, metrics: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        saver(counted, f"checkpoint.best={name}").check(metrics)


def test_a_metric_may_be_missing_where_it_was_not_measured(counted: Counted) -> None:
    held_out = saver(counted, SCORE)
    held_out.check({"policy/tokens": 3.0, "reward/mean": 1.0})  # no evaluation was due
    held_out.check({"eval/score": 1.0})
    own = saver(counted, "checkpoint.best=policy/nll")
    own.check({"policy/tokens": 0.0, "reward/mean": 1.0})  # nothing was trained on
    own.check({"eval/score": 1.0})
    own.check({"policy/tokens": 2.0, "policy/nll_invalid": 1.0})  # measured, and not finite
    own.check({"policy/tokens": 2.0})  # it has been seen
    with pytest.raises(ConfigError, match="policy/nll is not measured"):
        saver(counted, "checkpoint.best=policy/nll").check({"policy/tokens": 2.0})


def test_a_run_keeps_its_best_and_stopped_it_keeps_the_same(base: Path, tmp_path: Path) -> None:
    options = (
        *("critic.kind=head", "iterations=5", "checkpoint.best=policy/entropy"),
        *("checkpoint.best_mode=min", "checkpoint.every=0", "checkpoint.keep=1"),
    )
    whole = go(configure(base, tmp_path / "whole", *options))
    values = {row["step"]: row["policy/entropy"] for row in read_metrics(tmp_path / "whole")[1:]}
    best = min(values, key=lambda step: values[step])
    with_best = CheckpointStore(tmp_path / "whole/checkpoints", keep=1)
    known = with_best.best()
    assert known is not None and known[0] == best and known[1].value == values[best]
    assert with_best.steps() == sorted({best, 5})
    with_best.close()
    two = configure(base, tmp_path / "two", *options, "iterations=2")
    go(two)
    resumed = go(configure(base, tmp_path / "two", *options))
    same(resumed["state"], whole["state"])
    again = CheckpointStore(tmp_path / "two/checkpoints", keep=1)
    assert again.best() == known and again.steps() == sorted({best, 5})
    again.close()


def test_a_run_with_a_metric_that_does_not_come_ends_at_once(base: Path, tmp_path: Path) -> None:
    config = configure(base, tmp_path, "critic.kind=head", "checkpoint.best=eval/accuracy")
    with pytest.raises(ConfigError, match="eval/accuracy is not measured.*There are: .*eval/score"):
        go(config)
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]
