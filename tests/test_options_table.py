"""docs/options.md against the settings it describes and the tests it names."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from jaxrl.config import AlgorithmConfig, CriticConfig, RewardConfig, RolloutConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/options.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| `")
]

PLUMBING = {"functions", "models", "servers", "timeout_s"}
"""What `reward` has besides the shaping of scores."""
OF_ROLLOUT = {
    "dynamic_sampling",
    "max_rounds",
    "env",
    "max_turns",
    "max_turn_tokens",
    "env_timeout_s",
}


def defaults() -> dict[str, object]:
    """Keys that the table must have, with the default of each."""
    found: dict[str, object] = {}
    for section, settings in (
        ("algorithm", AlgorithmConfig()),
        ("critic", CriticConfig()),
        ("reward", RewardConfig()),
        ("rollout", RolloutConfig()),
    ):
        for field in fields(settings):
            left_out = section == "reward" and field.name in PLUMBING
            if left_out or (section == "rollout" and field.name not in OF_ROLLOUT):
                continue
            found[f"{section}.{field.name}"] = getattr(settings, field.name)
    return found


def shown(value: object) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_key_has_one_row_with_its_default() -> None:
    assert OF_ROLLOUT <= {field.name for field in fields(RolloutConfig)}
    keys = [row[0].strip("`") for row in ROWS]
    assert len(keys) == len(set(keys))
    assert {row[0].strip("`"): row[1].strip("`") for row in ROWS} == {
        key: shown(value) for key, value in defaults().items()
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("`"))
def test_a_row_is_whole_and_its_tests_exist(row: list[str]) -> None:
    assert len(row) == 6 and all(row)
    names = re.findall(r"`([^`]+)`", row[5])
    assert names
    for name in names:
        file, function = name.split("::")
        assert function.startswith("test_") and function in functions_of(file), name


def test_every_paper_that_is_cited_is_listed_and_the_other_way_round() -> None:
    listed = re.findall(r"^- \[([^\]]+)\]", TEXT, re.M)
    cited = {name for row in ROWS for name in re.findall(r"\[([A-Za-z0-9+.]+)\]", row[3])}
    assert cited == set(listed) and len(listed) == len(set(listed))
