"""What counts as a difference between engines, and the table; the real thing: rollout/sglang."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrl.compare import Row, config_for_comparison, faults, table
from jaxrl.config import Config
from jaxrl.errors import ConfigError

ROW = Row(
    round=1,
    engine="sglang",
    loss=0.25,
    ratio_mean=1.0000001,
    logprob_diff_mean=3e-7,
    logprob_diff_max=4e-6,
    grad_norm=2.0,
    tokens=48,
    same_tokens=1.0,
)
OWN = dataclasses.replace(ROW, engine="trainside", ratio_mean=1.0)
LIMITS = {"max_loss": 1.5e-3, "max_logprob": 1e-4}


def test_small_differences_are_none():
    assert faults([ROW, OWN], **LIMITS) == []


@pytest.mark.parametrize(
    ("which", "change", "said"),
    [
        (0, {"loss": 0.2517}, "round 1: the losses differ by 1.70e-03 > 0.0015"),
        (0, {"loss": float("nan")}, "the losses differ by nan"),
        (0, {"logprob_diff_mean": 2e-4}, "round 1, sglang: mean |dlogp| 2.00e-04 > 0.0001"),
        (1, {"logprob_diff_mean": float("nan")}, "round 1, trainside: mean |dlogp| nan"),
        (1, {"ratio_mean": 1.0000001}, "round 1, trainside: first ratio 1.0000001 is not exactly"),
        (0, {"grad_norm": 0.0}, "round 1, sglang: the gradient is 0.0, so nothing was updated"),
    ],
)
def test_each_limit(which: int, change: dict, said: str):
    rows = [ROW, OWN]
    rows[which] = dataclasses.replace(rows[which], **change)
    (found,) = faults(rows, **LIMITS)
    assert said in found


def test_the_table_has_a_line_for_each_row():
    lines = table([ROW, OWN]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "1.0000001" in lines[2] and "3.0e-07" in lines[2] and "trainside" in lines[3]


def test_there_must_be_a_server_to_compare_with():
    with pytest.raises(ConfigError, match="rollout.engine=trainside leaves nothing to compare"):
        config_for_comparison(Config())
