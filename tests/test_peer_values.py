"""Other trainers' numbers, reproduced with these functions or refused with a reason.

`data/peer_values.json` holds inputs and outputs of nine other trainers. Each function of theirs
has a recipe in `peers/` that says how to get the same numbers here: with which option, or with
which combination of functions, where the conventions differ. A recipe answers for every output of
a case. A case that is not reproduced stands in `REFUSED`, a function that concerns none of ours in
`NO_COUNTERPART`, each with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peers.advantages
import peers.corrections
import peers.layout
import peers.logprobs
import peers.losses
import peers.reductions
import peers.rewards  # noqa: F401
import pytest
from peers.recipe import RECIPES, At, Inputs

from jaxrl.errors import ConfigError

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "peer_values.json").read_text(encoding="utf-8"))["cases"]

ROUNDED = "logits or log-softmax rounded to bfloat16; here they are float32 for any input dtype"
REFUSED = {
    "trl.selective_log_softmax.09": ROUNDED,
    "trl.selective_log_softmax.12": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).02": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).06": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).10": ROUNDED,
    **dict.fromkeys(
        [f"unirl(own).TokenBudgetPlanner.arrange.{i}" for i in ("01", "02", "03", "06")],
        "pads micro-batches to their longest sample (dense); here samples lie packed in rows",
    ),
}
NO_COUNTERPART = {
    "unirl._resolve_clip_range_from_schedule": "the clips are constants; no paper on PPO for "
    "language models anneals them, and the optimizer's schedules already shorten the steps",
    "unirl(own).lpt_shard_permutation": "spreads samples over data-parallel ranks that each lay "
    "out their own; here one plan lays all samples out in rows of one length, and devices get rows",
}


def function_of(case: dict[str, Any]) -> str:
    return case["id"].rsplit(".", 1)[0]


def flat(outputs: dict[str, Any]) -> dict[str, Any]:
    """Outputs by name, those inside others included; null is what the peer does not give."""
    inner = [flat(x) for x in outputs.values() if isinstance(x, dict)]
    own = {k: x for k, x in outputs.items() if x is not None and not isinstance(x, dict)}
    return {k: x for one in (own, *inner) for k, x in one.items()}


def differences(case: dict[str, Any]) -> list[str]:
    """Outputs of a case that the recipe does not reproduce, with the largest excess."""
    ours = flat(RECIPES[function_of(case)](Inputs(case["inputs"]), case["params"]))
    wrong = []
    for name, expected in flat(case["outputs"]).items():
        got, where = ours[name] if isinstance(ours[name], At) else (ours[name], True)
        got, expected = np.asarray(got, float), np.asarray(expected, float)
        if got.shape != expected.shape:
            wrong.append(f"{name}: got shape {got.shape}, expected {expected.shape}")
            continue
        tolerance = 1e-4 if "whitened" in name or name == "out" else 2e-5
        off = np.abs(got - expected) > tolerance + tolerance * np.abs(expected)
        if np.any((off | np.isnan(got)) & where):
            wrong.append(f"{name}: got {got}, expected {expected}")
    return wrong


REPRODUCED = [c for c in CASES if c["id"] not in REFUSED and function_of(c) not in NO_COUNTERPART]


@pytest.mark.parametrize("case", REPRODUCED, ids=lambda c: c["id"])
def test_the_numbers_are_reproduced(case: dict[str, Any]) -> None:
    assert flat(case["outputs"])
    assert not differences(case)


def test_every_case_has_a_recipe_and_every_refusal_is_still_needed() -> None:
    assert not RECIPES.keys() & NO_COUNTERPART.keys()
    assert {function_of(c) for c in CASES} == RECIPES.keys() | NO_COUNTERPART.keys()
    by_id = {c["id"]: c for c in CASES}
    assert len(by_id) == len(CASES) == 281
    assert len(REPRODUCED) == 281 - 9 - 9
    assert REFUSED.keys() <= by_id.keys()
    assert all(not_ours(by_id[name]) for name in REFUSED)


def not_ours(case: dict[str, Any]) -> bool:
    """Other numbers come out here, or as many as do not fit, or an error."""
    try:
        return bool(differences(case))
    except (ConfigError, ValueError):
        return True
