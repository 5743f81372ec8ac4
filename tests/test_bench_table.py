"""The table of benchmarks: what its figures mean, and that all sides get the stated inputs.

The peers' own programs need the peers' environments and are run by scripts/bench_peers.sh alone.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxrl.models import weight_table

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def inputs() -> ModuleType:
    return importlib.import_module("bench_inputs")


@pytest.fixture
def rows() -> ModuleType:
    return importlib.import_module("bench_rows")


@pytest.fixture
def verdicts() -> ModuleType:
    return importlib.import_module("bench_verdicts")


@pytest.fixture
def bench_page() -> ModuleType:
    return importlib.import_module("bench_page")


def side(cpu_s: float, temp_mib: float = 0.0, rss_mib: float = 300.0, **more: Any) -> dict:
    return {
        "cpu_s": cpu_s, "cpu_all_s": [cpu_s] * 5, "temp_bytes": temp_mib * 2**20,
        "peak_rss_bytes": rss_mib * 2**20, "load": [1.0, 2.0], "check": {}, "stages": {},
        "tokens": 10, "versions": {"some": "1.0"}, **more,
    }  # fmt: skip


def child(times: list[float], **more: Any) -> dict:
    return {
        "cpu_all_s": times, "wall_s": 1.0, "setup_s": 2.0, "temp_bytes": 8, "peak_rss_bytes": 16,
        "tokens": 10, "load": 1.5, "check": {"loss": 0.5}, "stages": {},
        **more,
    }  # fmt: skip


def test_all_calls_of_all_processes_count_for_the_median(verdicts: ModuleType) -> None:
    # Medians of each process first would give the median of 2 and 10, which is 6.
    row = verdicts.pooled([child([1.0, 2.0, 3.0], load=0.5), child([9.0, 10.0])])
    assert row["cpu_s"] == 3.0
    assert row["load"] == [0.5, 1.5]
    assert row["check"] == {"loss": 0.5}


def test_time_is_held_against_the_fastest_that_is_there(
    rows: ModuleType, verdicts: ModuleType
) -> None:
    row = rows.ROWS["policy_step"]  # at most .8 of the least of three
    sides = {"jaxrl": side(3.0), "trl": side(8.0), "tunix": side(9.0)}
    assert verdicts.judge_time(row, sides)[::2] == ("0.38x", "yes")
    sides["trl-chunked"] = side(3.5)
    assert verdicts.judge_time(row, sides)[::2] == ("0.86x", "no")


def test_time_near_its_products_counts_as_reached(rows: ModuleType, verdicts: ModuleType) -> None:
    row = rows.ROWS["head"]  # consists of four of its product
    sides = {"jaxrl": side(4.7), "tokamax": side(4.0), "products": side(1.0)}
    assert verdicts.judge_time(row, sides).reached == "yes, at 1.18x its products"
    sides["jaxrl"] = side(4.9)
    assert verdicts.judge_time(row, sides).reached == "no"


def test_products_can_be_the_limit_itself(rows: ModuleType, verdicts: ModuleType) -> None:
    row = rows.ROWS["head_large"]
    sides = {"jaxrl": side(4.5), "products": side(1.0)}
    assert verdicts.judge_time(row, sides) == ("1.12x", "at most 1.15x products", "yes")


def test_memory_is_held_against_a_peer_or_a_number(rows: ModuleType, verdicts: ModuleType) -> None:
    sides = {"jaxrl": side(1.0, temp_mib=15.0), "tunix": side(1.0, temp_mib=90.0)}
    assert verdicts.judge_memory(rows.ROWS["head"], sides)[::2] == ("15.0 MiB", "yes")
    assert verdicts.judge_memory(rows.ROWS["policy_step"], sides)[::2] == ("0.17x", "no")
    assert verdicts.judge_memory(rows.ROWS["sampler"], sides) == ("", "", "")


def test_memory_of_an_iteration_is_the_whole_process(
    rows: ModuleType, verdicts: ModuleType
) -> None:
    sides = {"jaxrl": side(1.0, temp_mib=9.0, rss_mib=600.0), "trl": side(1.0, rss_mib=1000.0)}
    assert verdicts.judge_memory(rows.ROWS["iteration"], sides)[::2] == ("0.60x", "yes")
    assert verdicts.judge_memory(rows.ROWS["iteration_head"], sides)[::2] == ("0.60x", "no")


def test_missing_peers_give_no_verdict(rows: ModuleType, verdicts: ModuleType) -> None:
    row = rows.ROWS["head"]
    alone = {"jaxrl": side(4.0, temp_mib=15.0)}
    assert verdicts.judge_time(row, alone)[::2] == ("-", "not measured")
    assert verdicts.judge_memory(row, alone).reached == "yes"
    # The products are ours, so they can still tell that a time is reached, but not that it is not.
    assert "yes" in verdicts.judge_time(row, alone | {"products": side(0.9)}).reached
    assert verdicts.judge_time(row, alone | {"products": side(0.5)}).reached == "not measured"


def test_a_row_can_be_measured_in_another(bench_page: ModuleType) -> None:
    sides = {"jaxrl": side(9.0), "ours: head": side(3.0, rss_mib=400.0), "trl": side(10.0, 0, 1000)}
    both = bench_page.table({"iteration": {"sides": sides}}).splitlines()[2:]
    assert "| 0.90x | at most 0.35x trl | no |" in both[0]
    assert "| 0.30x | at most 0.35x trl | yes | 0.40x | at most 0.5x trl | yes |" in both[1]
    del sides["ours: head"]
    assert len(bench_page.table({"iteration": {"sides": sides}}).splitlines()) == 3


def test_page_names_what_is_left_out(bench_page: ModuleType) -> None:
    origin = {"date": "2026-12-03T08:00+00:00", "git_commit": "abcdef0123", "cpus": 2}
    entry = {**origin, "versions": {"jax": "0.10.2"}, "sides": {"jaxrl": side(0.02, 15.0)}}
    text = bench_page.page({"gae": entry}, ["tunix"], ["iteration"])
    assert "| 20 ms, 15 MiB | - | - | - | - | - | at most 0.8x tunix | not measured |" in text
    assert "- Tunix: tunix is not installed here" in text
    assert "has no section iteration_smollm2" in text
    assert "code abcdef0, 2 CPUs, load 1.0 to 2.0, 5 calls" in text
    assert "- jaxrl: jax 0.10.2" in text


def test_parts_of_an_iteration_and_what_is_left(bench_page: ModuleType) -> None:
    spent = {"generate_s": 5.0, "pack_s": 0.5, "update_s": 4.0}
    line = bench_page.parts_line("it", side(10.0, stages=spent))
    assert line == (
        "- it: generate 5, pack 0.5, update 4 of 10 CPU s, 1.0000 a response token; "
        "90.0% inside the sampler and the steps"
    )
    assert bench_page.parts_line("it", side(10.0)) is None


def test_rows_ask_for_sections_and_programs_that_exist(rows: ModuleType) -> None:
    sections = importlib.import_module("bench_sections").SECTIONS
    for name, row in rows.ROWS.items():
        sides = {"products"} | set(row.others)
        assert set(row.time.of) <= sides and set(row.memory.of if row.memory else ()) <= sides, name
        for other, section in row.others.items():
            if other in rows.PEERS:
                program = SCRIPTS / "peers" / rows.PEERS[other].program
                assert f'"{section}": ' in program.read_text()
            else:
                assert section in sections
    assert all((SCRIPTS / "peers" / f"{name}.txt").is_file() for name in rows.PEERS)


def test_absent_environments_are_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: ModuleType
) -> None:
    table = importlib.import_module("bench_table")
    monkeypatch.setattr(table, "VENVS", tmp_path)
    python = tmp_path / "tunix" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert "tunix" not in table.missing()[0] and "trl" in table.missing()[0]
    planned = [p.side for p in table.programs(rows.ROWS["critic_step"])]
    assert planned[0] == "jaxrl" and planned[-1] == "tunix" and "trl" not in planned


def test_a_program_that_fails_is_named(rows: ModuleType) -> None:
    table = importlib.import_module("bench_table")
    broken = table.Program("trl", [sys.executable, "-c", "raise ValueError('why')"], 1)
    with pytest.raises(table.Failed, match="(?s)ValueError: why.*exit status 1"):
        table.run(broken, False)


def test_inputs_need_numpy_alone(inputs: ModuleType) -> None:
    for name in ("bench_inputs", "bench_timing"):
        source = (SCRIPTS / f"{name}.py").read_text()
        assert not any(word in source for word in ("import jax", "from jax", "import torch"))
    for name in ("bench_rows", "bench_verdicts", "bench_page"):
        assert "jax" not in [line.split()[1] for line in importable(SCRIPTS / f"{name}.py")]


def importable(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line.startswith(("import ", "from "))]


def test_shapes_are_those_of_the_weight_table(inputs: ModuleType) -> None:
    model = importlib.import_module("bench_model")
    for sizes in (inputs.SMALL, inputs.Sizes()):
        table = weight_table(model.model_of(sizes).config)
        expected = {name: tuple(w.hf_shape) for w in table for name in w.hf_names()}
        assert inputs.tensor_shapes(sizes) == expected
    assert sum(map(int, map(np.prod, inputs.tensor_shapes(inputs.Sizes()).values()))) == 20_711_936


def test_ragged_batch_is_the_published_one(inputs: ModuleType) -> None:
    batch = inputs.ragged_batch()
    assert batch.response_lengths == [
        104, 38, 206, 29, 64, 44, 86, 56, 25, 49, 74, 16, 133, 10, 21, 34
    ]  # fmt: skip
    assert [len(prompt) for prompt in batch.prompts] == [
        25, 64, 38, 49, 16, 133, 10, 44, 29, 104, 206, 21, 86, 34, 56, 74
    ]  # fmt: skip
    assert sum(batch.response_lengths) == 989
    assert batch.prompts[0][:4] == [42145, 30108, 5641, 2162]
    assert min(map(min, batch.prompts)) >= 3  # padding, ends and the like are never drawn


def test_gae_inputs_give_the_peers_published_figures(inputs: ModuleType) -> None:
    # By a loop of its own: the masked sum of returns of Tunix 0.1.7 on these inputs.
    rewards, values, mask = inputs.gae_inputs((64, 1024))
    total, advantage, following = 0.0, np.zeros(64), np.zeros(64)
    for t in reversed(range(1024)):
        delta = rewards[:, t] + 0.99 * following - values[:, t]
        advantage = np.where(mask[:, t], delta + 0.99 * 0.95 * advantage, advantage)
        following = np.where(mask[:, t], values[:, t], following)
        total += ((advantage + values[:, t]) * mask[:, t]).sum()
    assert total == pytest.approx(-5120.680, abs=0.01)
