"""The benchmark script at tiny sizes: every section runs, and what it reports is true."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.models import weight_table

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with the imports it has when it is run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench")


@pytest.fixture
def model(bench: ModuleType) -> ModuleType:
    return importlib.import_module("bench_model")


@pytest.mark.parametrize(
    "section",
    [
        *("head_products", "head_entropy_gradient", "policy_step", "critic_step", "sampler"),
        *("policy_step_products", "sampler_products"),
    ],
)
def test_section_runs_and_reports(bench: ModuleType, section: str) -> None:
    row = bench.measure(section, bench.SMALL, 2)
    assert row["repeats"] == 2
    assert 0 < row["wall_min_s"] <= row["wall_s"]
    assert row["cpu_s"] > 0
    assert row["peak_rss_bytes"] > 2**26
    assert row["temp_bytes"] > 0 or section.endswith("products")
    assert all(np.isfinite(x) for x in row["check"].values())


def test_sections_work_through_the_stated_tokens(bench: ModuleType) -> None:
    sizes = bench.SMALL
    tokens = {name: bench.SECTIONS[name](sizes).tokens for name in ("head_forward", "gae_large")}
    assert tokens == {"head_forward": 2 * 32, "gae_large": 5 * 70}


def test_command_writes_table_and_json(
    bench: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    bench.main(["--small", "--repeats", "1", "--only", "gae_small", "--json", str(out)])
    printed = capfd.readouterr().out.splitlines()
    assert printed[0].startswith("| section | CPU s |")
    assert printed[2].startswith("| gae_small |")
    report = json.loads(out.read_text())
    assert set(report) >= {"date", "device", "cpus", "versions", "git_commit", "sizes", "sections"}
    assert report["versions"]["jax"] == jax.__version__
    assert report["sizes"]["vocab"] == 515
    assert report["sections"]["gae_small"]["check"]["returns_sum"] != 0.0


def test_a_section_that_fails_is_named(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.sys, "executable", "false")
    with pytest.raises(SystemExit, match="section gae_small failed with exit status 1"):
        bench.main(["--small", "--only", "gae_small"])


def test_one_accelerator_s_script_runs_anywhere(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("bench_gpu").main(["--small", "--repeats", "1"])
    printed = capsys.readouterr().out
    assert printed.count(" | ") >= 12 and "| policy step |" in printed
    assert "first update: ratios from 1.0 to 1.0" in printed


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--only", "nothing"]])
def test_bad_arguments_are_refused(bench: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2


def test_table_is_in_the_units_it_states(bench: ModuleType) -> None:
    row: dict[str, Any] = {
        "cpu_s": 2.0, "wall_s": 1.5, "tokens_per_cpu_s": 50.0, "temp_bytes": 3 * 2**20,
        "peak_rss_bytes": 400 * 2**20,
    }  # fmt: skip
    last = bench.table({"x": row}).splitlines()[-1]
    assert last == "| x | 2 | 1.5 | 50 | 3.0 | 400 |"


def test_published_model_has_the_stated_size(bench: ModuleType, model: ModuleType) -> None:
    table = weight_table(model.model_of(bench.Sizes()).config)
    assert sum(int(np.prod(w.full_shape)) for w in table) == 20_711_936


def test_weights_follow_the_order_of_the_sorted_names(bench: ModuleType, model: ModuleType) -> None:
    # lm_head.weight sorts before every model.* name, so it takes the first draws.
    params = model.weights_of(model.model_of(bench.SMALL))
    first = np.random.default_rng(0).standard_normal((515, 32), np.float32) * np.float32(0.02)
    np.testing.assert_array_equal(params["head"]["kernel"], first.T)
    np.testing.assert_array_equal(params["norm"]["scale"], 1.0)


def test_rows_are_full_and_scored_at_every_response_token(
    bench: ModuleType, model: ModuleType
) -> None:
    packed = model.packed_rows(bench.SMALL)
    ids = np.random.default_rng(1).integers(3, 515, (2, 32), dtype=np.int32)
    np.testing.assert_array_equal(packed.tokens, ids)
    assert bool(packed.policy_valid.all())
    np.testing.assert_array_equal(packed.policy_targets, ids[:, 8:])
