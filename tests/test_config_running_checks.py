"""Rules on the best checkpoint: what can be known to be wrong before anything is loaded."""

from __future__ import annotations

import pytest

from jaxrl.config_checks import check_config
from jaxrl.config_io import load_config
from jaxrl.errors import ConfigError

WORKING = ["model.path=m", "data.train.path=x.jsonl", "reward.functions=[{fn: m:f}]"]
HELD_OUT = "data.eval={kind: file, path: y.jsonl}"
AHEAD = [
    *("rollout.engine=sglang", "rollout.urls=[http://127.0.0.1:30000]"),
    *("rollout.max_staleness=1", "algorithm.importance=token"),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.best_mode=min"], "best_mode=min is read with checkpoint.best only"),
        (
            ["checkpoint.best=eval/score"],
            "best=eval/score is measured on .*data.eval=null",
        ),
        (["checkpoint.best=time/iteration_s"], "time/iteration_s depends on the machine"),
        (["checkpoint.best=speed/generated_tokens_per_s"], "depends on the machine"),
        (
            ["checkpoint.best=reward/mean", *AHEAD],
            "reward/mean may save any iteration.*max_staleness=1.*e.g. eval/score",
        ),
    ],
)
def test_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_config(load_config([], [*WORKING, *overrides]))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.best=eval/score", HELD_OUT],
        ["checkpoint.best=reward/mean", "checkpoint.best_mode=min"],
        ["checkpoint.best=eval/score", HELD_OUT, *AHEAD],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    check_config(load_config([], [*WORKING, *overrides]))
