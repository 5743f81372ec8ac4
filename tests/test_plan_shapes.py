"""Bytes of a plan by hand, what plans refuse, and what the model table says."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.errors import ConfigError
from jaxrl.models import ModelConfig, weight_table
from jaxrl.planner.analytic import beside, estimated_steps, held, host_memory
from jaxrl.planner.run_shapes import find_model, longest_batch, shapes_of
from jaxrl.planner.targets import Target, parse_bytes, parse_target

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "configs" / "models"
MODEL = ModelConfig(
    "llama",
    vocab_size=24,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    tie_word_embeddings=True,
)


def settings(*overrides: str) -> Config:
    """Four prompts twice, each trajectory a row of 16 tokens; two updates."""
    return load_config(
        [],
        [
            *("model.path=x", "rollout.prompts=4", "rollout.samples=2"),
            *("data.max_prompt_tokens=6", "rollout.max_new_tokens=10"),
            *("packing.row_lengths=[16]", "packing.micro_batch_tokens=64", "algorithm.updates=2"),
            *("mesh.fsdp=2", "mesh.tensor=2", *overrides),
        ],
    )


def test_bytes_on_a_device_by_hand():
    sizes = held(shapes_of(settings(), MODEL, 4))
    # Split over fsdp x tensor: embedding 24 x 8; a layer: q 8 x 8, k and v 8 x 4 each, o 8 x 8,
    # three of 8 x 12. Whole everywhere: five norms of 8.
    split = (24 * 8 + 2 * (64 + 32 + 32 + 64 + 3 * 96)) // 4
    assert sizes["policy parameters"] == 4 * (split + 5 * 8)
    # Two moments; Adam's and the schedule's count.
    assert sizes["policy optimizer"] == 2 * 4 * (split + 5 * 8) + 2 * 4
    assert sizes["value parameters"] == 4 * (8 + 1)
    assert sizes["value optimizer"] == 2 * 4 * 9 + 2 * 4
    assert sizes["counters"] == 5 * 4 + 3 * 4
    assert sizes["reference"] == 0
    # 2 updates x 1 micro-batch x 4 rows, 2 of them here; a row has 4 fields of 16 tokens and 9 of
    # 10 slots, two of them bytes.
    slots, bytes_a_slot = 10, 7 * 4 + 2
    row = 4 * 4 * 16 + bytes_a_slot * slots
    assert sizes["packed batch"] == 2 * 2 * row
    assert sizes["anchors"] == 2 * 2 * 4 * 4 * slots
    assert sizes["training batch"] == 2 * 2 * (row + (6 * 4 + 1) * slots)


def test_an_own_trunk_and_a_reference_are_counted():
    head, both = (
        held(shapes_of(settings(*more), MODEL, 4))
        for more in ((), ("critic.kind=model", "algorithm.kl_in=report"))
    )
    policy = head["policy parameters"]
    assert both["reference"] == policy
    assert both["value parameters"] == policy + head["value parameters"]
    untied = dataclasses.replace(MODEL, tie_word_embeddings=False)
    sizes = held(shapes_of(settings("critic.kind=model"), untied, 4))
    # A critic's trunk has no output head.
    assert sizes["policy parameters"] == policy + 4 * 24 * 8 // 4
    assert sizes["value parameters"] == both["value parameters"]


def test_what_lies_beside_a_step_is_what_is_no_argument_of_it():
    shapes = shapes_of(settings("algorithm.kl_in=report"), MODEL, 4)
    sizes = held(shapes)
    optimizers = sizes["policy optimizer"] + sizes["value optimizer"] + sizes["counters"]
    assert beside(shapes, "score") == optimizers
    batches = sizes["packed batch"] + sizes["anchors"] + sizes["training batch"]
    assert beside(shapes, "update") == sizes["reference"] + batches
    everything = {s.step: s.arguments + s.beside for s in estimated_steps(shapes)}
    state = optimizers + sizes["policy parameters"] + sizes["value parameters"]
    part = sizes["training batch"] // 2
    assert everything["update"] == state + sizes["reference"] + batches + part
    assert everything["score"] == state + sizes["reference"] + sizes["packed batch"]


def test_a_host_holds_a_checkpoint_of_its_devices():
    shapes = shapes_of(settings(), MODEL, 4)
    sizes = held(shapes)
    names = ("policy parameters", "policy optimizer", "value parameters", "value optimizer")
    state = sum(sizes[name] for name in (*names, "counters"))
    assert host_memory(shapes, 2)["checkpoint being written"] == 2 * state


def test_estimates_follow_what_they_depend_on():
    def update(*overrides: str, step: str = "update") -> dict[str, int]:
        shapes = shapes_of(settings(*overrides), MODEL, 4)
        return dict({s.step: s for s in estimated_steps(shapes)}[step].parts)

    plain = update()
    # 2 layers keep 2 rows of 16 tokens and 8 features in float32.
    assert plain["kept by layers"] == 2 * 2 * 16 * 8 * 4
    # A critic's own trunk has its turn after the policy's.
    own = update("critic.kind=model")
    assert own["kept by layers"] == plain["kept by layers"]
    assert own["gradients of a micro-batch"] < own["gradients, summed"]
    assert plain["gradients of a micro-batch"] == plain["gradients, summed"]
    assert update("model.dtype=bfloat16")["kept by layers"] == plain["kept by layers"] // 2
    kept = [
        update(f"model.remat={r}")["kept by layers"] for r in ("full", "attention", "dots", "none")
    ]
    assert kept == sorted(set(kept))
    half = update("packing.micro_batch_tokens=32")
    assert half["kept by layers"] == plain["kept by layers"] // 2
    sampled = update("rollout.batch_size=8", step="sample")
    # Keys and values of 2 layers, one head of 2 here; 4 rows of 16 prompt columns and 9 new ones.
    assert sampled["cache"] == 2 * 2 * 2 * 4 * 4 * (16 + 9)
    gathered = sum(math.prod(w.full_shape) for w in weight_table(MODEL)) * 4 // 2
    assert sampled["weights"] == gathered
    spread = update("rollout.batch_size=8", "rollout.gather_weights=false", step="sample")
    assert spread["weights"] == gathered // 2


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("analytic:64", Target("analytic", 64, devices_a_host=8)),
        ("analytic:v5e:8", Target("analytic", 8, "v5e", devices_a_host=8)),
        ("cpu:4", Target("cpu", 4, devices_a_host=4)),
        ("cuda:h100:2x4x8", Target("cuda", 64, "h100", "2x4x8", 8)),
        ("tpu:v5p:4x4x4", Target("tpu", 64, "v5p", "4x4x4", 4)),
        ("tpu:v5e:2x4", Target("tpu", 8, "v5e", "2x4", 4)),
    ],
)
def test_targets_are_read(text: str, target: Target):
    assert parse_target(text) == target and str(target) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("analytic", "none of analytic:DEVICES"),
        ("analytic:0", "none of analytic"),
        ("analytic:2x4", "none of analytic"),
        ("cpu:h100:8", "none of analytic"),
        ("gpu:h100:1x1x8", "none of analytic"),
        ("cuda:1x1x8", "none of analytic"),
        ("cuda:v5p:1x1x8", "'v5p' is not known.*'h100'"),
        ("cuda:h100:8", "topology of h100 has 3 sizes, e.g. cuda:h100:2x2x2"),
        ("tpu:v5e:2x2x2", "topology of v5e has 2 sizes"),
        ("analytic:a100:8", "'a100' is not known"),
    ],
)
def test_other_targets_are_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_target(text)


def test_sizes_of_memory_are_read():
    assert parse_bytes("80GiB") == 80 * 2**30 == parse_bytes("80G") == parse_bytes("80 GB")
    assert parse_bytes("15.75GiB") == 63 * 2**28 and parse_bytes("1000") == 1000
    for text in ("80 gigabytes", "GiB", "-1G", "0GiB"):
        with pytest.raises(ConfigError, match="write e.g. 80GiB"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ((), 8, "mesh.fsdp=2, mesh.tensor=2 does not cover 8"),
        (("mesh.tensor=4",), 8, r"mesh.tensor=4 does not divide axis 'kv_heads' .* \[1, 2\]"),
        (("mesh.fsdp=3",), 6, "mesh.fsdp=3 does not divide axis"),
        (
            ("packing.micro_batch_tokens=32", "mesh.data=4"),
            16,
            r"holds no 8 row\(s\) of 16 tokens; raise it to at least 128",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(overrides: tuple, devices: int, message: str):
    with pytest.raises(ConfigError, match=message):
        shapes_of(settings(*overrides), MODEL, devices)


def test_the_longest_batch_gives_every_trajectory_its_full_length():
    layout = longest_batch(settings("packing.micro_batch_tokens=48"), multiple=2)
    assert (layout.updates, layout.micros, layout.rows) == (2, 2, 2)
    assert (layout.row_length, layout.policy_length) == (16, 10)
    shared = longest_batch(settings("packing.row_lengths=[32]"), multiple=2)
    # A prompt with both responses in a row: 6 + 2 x 10 tokens, of 32.
    assert (shared.micros, shared.rows, shared.policy_length) == (1, 2, 20)
    ends = longest_batch(settings("algorithm.truncated=bootstrap"), multiple=2)
    assert ends.policy_length == 12  # eighths of a row: 11 are needed


PARAMETERS = {
    "Meta-Llama-3-70B": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B-Base": 4_022_468_096,
    "SmolLM2-135M-Instruct": 134_515_008,
}
"""As published."""


def test_the_table_of_models_has_the_published_parameters():
    found = {}
    for file in TABLE.glob("*.json"):
        config = ModelConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
        found[file.stem] = sum(math.prod(w.full_shape) for w in weight_table(config))
    assert found == PARAMETERS


def test_a_model_is_found_by_file_folder_or_table(tmp_path: Path):
    at_home = settings("model.path=models/Qwen3-32B")
    assert find_model(at_home, None, TABLE)[1].num_hidden_layers == 64
    folder = tmp_path / "Qwen3-32B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL.to_hf()), encoding="utf-8")
    own = settings(f"model.path={folder}")
    assert find_model(own, None, TABLE) == ("Qwen3-32B", MODEL)
    given = find_model(own, TABLE / "Qwen3-0.6B.json", TABLE)
    assert given[0] == "Qwen3-0.6B" and given[1].hidden_size == 1024
    with pytest.raises(ConfigError, match="model.path=x: neither .*Qwen3-4B-Base"):
        find_model(settings(), None, TABLE)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_model(settings(), ROOT / "README.md", TABLE)
