"""Other trainers' numbers, reproduced with these functions or refused with a reason.

`data/peer_values.json` holds inputs and outputs of nine other trainers. Each function of theirs
has a recipe in `peers/` that says how to get the same numbers here: with which option, or with
which combination of functions, where the conventions differ. A recipe answers for every output of
a case. A case that is not reproduced stands in `REFUSED`, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peers.advantages
import peers.logprobs
import peers.losses
import peers.reductions
import peers.rewards  # noqa: F401
import pytest
from peers.recipe import RECIPES, At, Inputs

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "peer_values.json").read_text(encoding="utf-8"))["cases"]

ROUNDED = "logits or log-softmax rounded to bfloat16; here they are float32 for any input dtype"
REFUSED = {
    "trl.selective_log_softmax.09": ROUNDED,
    "trl.selective_log_softmax.12": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).02": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).06": ROUNDED,
    "xtuner.LogProbContext(eager|chunk).10": ROUNDED,
}


def function_of(case: dict[str, Any]) -> str:
    return case["id"].rsplit(".", 1)[0]


def differences(case: dict[str, Any]) -> list[str]:
    """Outputs of a case that the recipe does not reproduce, with the largest excess."""
    ours = RECIPES[function_of(case)](Inputs(case["inputs"]), case["params"])
    wrong = []
    for name, expected in case["outputs"].items():
        got, where = ours[name] if isinstance(ours[name], At) else (ours[name], True)
        got, expected = np.asarray(got, float), np.asarray(expected, float)
        assert got.shape == expected.shape, name
        tolerance = 1e-4 if "whitened" in name or name == "out" else 2e-5
        off = np.abs(got - expected) > tolerance + tolerance * np.abs(expected)
        if np.any((off | np.isnan(got)) & where):
            wrong.append(f"{name}: got {got}, expected {expected}")
    return wrong


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["id"] not in REFUSED], ids=lambda c: c["id"]
)
def test_the_numbers_are_reproduced(case: dict[str, Any]) -> None:
    assert case["outputs"]
    assert not differences(case)


def test_every_case_has_a_recipe_and_every_refusal_is_still_needed() -> None:
    assert {function_of(c) for c in CASES} == set(RECIPES)
    by_id = {c["id"]: c for c in CASES}
    assert len(by_id) == len(CASES) == 264
    assert REFUSED.keys() <= by_id.keys()
    assert all(differences(by_id[name]) for name in REFUSED)
