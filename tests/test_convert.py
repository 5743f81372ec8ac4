"""scripts/convert.py: there and back, what it checks, and what it refuses."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig
from jaxrl.types import TrainState
from tests.checkpoint.families import assert_same_tree, config_of, make_model

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import convert
import convert_check


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3-untied").save_pretrained(path)
    return path


def trained(folder: Path, scale: float, critic: str = "head") -> TrainState:
    """A state as a run saves it: a moved policy, a critic, moments of both optimizers."""
    policy = jax.tree.map(lambda x: x * scale, load_params(folder, config_of(folder)))
    kernel = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    value: dict[str, Any] = {"value_head": {"kernel": kernel, "bias": np.full(1, 0.5, np.float32)}}
    if critic == "model":
        value["trunk"] = {
            name: jax.tree.map(lambda x: x * 0.9, policy[name])
            for name in ("embed", "layers", "norm")
        }
    elif critic == "none":
        value = {}
    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=optax.adam(1e-3).init(policy),
        value_opt=optax.adam(1e-3).init(value),
        updates=np.int32(8),
        iteration=np.int32(4),
        kl_coef=np.float32(0.1),
        reward_moments=np.zeros(3, np.float32),
        skipped=np.int32(0),
        skipped_in_a_row=np.int32(0),
    )


@pytest.fixture(scope="module")
def run_dir(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of iterations 2 and 4."""
    path = tmp_path_factory.mktemp("run")
    store = CheckpointStore(path / "checkpoints", keep=2)
    for step, scale in ((2, 1.02), (4, 1.04)):
        store.save(step, trained(folder, scale), {"config": {"model": {"path": str(folder)}}})
    store.close()
    return path


def test_there_and_back_keeps_every_bit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert convert.main(["hf-to-jaxrl", str(folder), str(there), "--check"]) == 0
    assert convert.main(["jaxrl-to-hf", str(there), str(back), "--check"]) == 0
    checks = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check:")]
    assert len(checks) == 4 and all(" agree: " in line for line in checks)
    config = config_of(folder)
    assert config_of(back) == config
    assert_same_tree(load_params(back, config), load_params(folder, config))


def test_the_newest_policy_of_a_run_is_exported(
    folder: Path, run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["jaxrl-to-hf", str(run_dir), str(out), "--dtype", "bfloat16", "--check"]
    assert convert.main([*command, "--max-shard-bytes", "20000"]) == 0
    config = config_of(out)
    expected = jax.tree.map(
        lambda x: x.astype("bfloat16").astype(np.float32), trained(folder, 1.04).policy_params
    )
    assert_same_tree(load_params(out, config), expected)
    assert load_hf_config(out)["dtype"] == "bfloat16"
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2


@pytest.mark.parametrize("by", ["step", "folder", "name"])
def test_a_checkpoint_can_be_named(by: str, folder: Path, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    where = {
        "step": [str(run_dir / "checkpoints"), str(out), "--step", "2"],
        "folder": [str(run_dir / "checkpoints" / "00000002"), str(out)],
        "name": [str(run_dir), str(out), "--step", "latest"],
    }[by]
    assert convert.main(["jaxrl-to-hf", *where]) == 0
    scale = 1.04 if by == "name" else 1.02
    expected: dict[str, Any] = trained(folder, scale).policy_params
    assert_same_tree(load_params(out, config_of(out)), expected)


@pytest.mark.parametrize("critic", ["head", "model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_is_exported_with_its_value_of_every_state(
    critic: str, dtype: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained(folder, 1.04, critic)
    save(tmp_path / "run", folder, state)
    out = tmp_path / "critic"
    command = ["jaxrl-to-hf", str(tmp_path / "run"), str(out), "--critic", "--check"]
    assert convert.main([*command, "--dtype", dtype]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" agree: largest difference of values") == 1
    assert f"checkpoint in {dtype} and export agree: 37 tensors, in every bit" in printed
    assert f"in {dtype}, the critic of step 1" in printed

    theirs: Any = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    assert theirs.config.num_labels == 1 and theirs.dtype == getattr(torch, dtype)
    tokens = np.random.default_rng(1).integers(0, 64, (2, 9), dtype=np.int32)
    with torch.no_grad():
        values = theirs.float()(torch.tensor(tokens, dtype=torch.long)).logits[..., 0].numpy()
    trunk = state.value_params.get("trunk", state.policy_params)
    rounded = jax.tree.map(
        lambda x: x.astype(dtype).astype(np.float32), {**trunk, **state.value_params}
    )
    expected = convert_check.values(rounded, config_of(folder), tokens)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 0.1


def test_a_checkpoint_without_a_critic_has_none_to_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", folder, trained(folder, 1.0, "none"))
    command = ["jaxrl-to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--critic"]
    assert convert.main(command) == 1
    assert "step 1 in" in (error := capsys.readouterr().err)
    assert "has no critic; leave out --critic(-head)" in error
    assert convert.main([*command[:-1], "--critic-head"]) == 1
    assert not (tmp_path / "out").exists()


def save(run_dir: Path, folder: Path, state: TrainState) -> None:
    store = CheckpointStore(run_dir / "checkpoints", keep=1)
    store.save(1, state, {"config": {"model": {"path": str(folder)}}})
    store.close()


def test_a_moved_model_folder_has_to_be_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, tmp_path / "model")
    assert convert.main(["hf-to-jaxrl", str(tmp_path / "model"), str(tmp_path / "there")]) == 0
    (tmp_path / "model").rename(moved)
    command = ["jaxrl-to-hf", str(tmp_path / "there"), str(tmp_path / "out")]
    assert convert.main(command) == 1
    assert "give that folder with --source" in capsys.readouterr().err
    assert convert.main([*command, "--source", str(moved)]) == 0


def test_no_checkpoint_is_one_clear_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert convert.main(["jaxrl-to-hf", str(tmp_path / "absent"), out]) == 1
    assert "absent is no folder" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoints" / "00000003").mkdir(parents=True)
    assert convert.main(["jaxrl-to-hf", str(tmp_path / "run"), out]) == 1
    error = capsys.readouterr().err
    assert "holds no whole checkpoint" in error and "00000003" in error
    assert convert.main(["hf-to-jaxrl", str(folder), str(tmp_path)]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_critics_head_is_exported_as_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained(folder, 1.0, "model")
    save(tmp_path / "run", folder, state)
    out = tmp_path / "heads" / "head.safetensors"
    command = ["jaxrl-to-hf", str(tmp_path / "run"), str(out), "--critic-head", "--check"]
    assert convert.main(command) == 0
    assert "export agree: 2 tensors, in every bit" in capsys.readouterr().out
    head = state.value_params["value_head"]
    found = load_file(out)
    assert found.keys() == {"score.weight", "score.bias"}
    np.testing.assert_array_equal(found["score.weight"], head["kernel"].T)
    np.testing.assert_array_equal(found["score.bias"], head["bias"])
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert convert.main([*command[:2], str(tmp_path / "head"), "--critic-head"]) == 1
    assert "must be the name of a file that ends in .safetensors" in capsys.readouterr().err


def changed(path: Path) -> None:
    """One norm's scale in a folder becomes another, by a thousandth in one element."""
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][5] *= 1.001
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_check_fails_where_weights_differ(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A result that is not the source's must not pass."""
    there, out = tmp_path / "there", tmp_path / "out"
    assert convert.main(["hf-to-jaxrl", str(folder), str(there)]) == 0
    real = convert.export_hf

    def damaged(*arguments: Any, **settings: Any) -> None:
        real(*arguments, **settings)
        changed(out)

    monkeypatch.setattr(convert, "export_hf", damaged)
    assert convert.main(["jaxrl-to-hf", str(there), str(out), "--check"]) == 1
    error = capsys.readouterr().err
    assert "checkpoint in float32 and export disagree in 1 tensor(s)" in error
    assert "model.norm.weight: 1 elements, by up to" in error

    def other(path: Path, config: ModelConfig, **settings: Any) -> dict[str, Any]:
        return load_params(out, config, **settings)

    monkeypatch.setattr(convert, "load_params", other)
    assert convert.main(["hf-to-jaxrl", str(folder), str(tmp_path / "two"), "--check"]) == 1
    assert "source and checkpoint disagree in 1 tensor(s)" in capsys.readouterr().err


def test_outputs_that_differ_fail_and_models_too_large_are_not_compared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    changed(other)
    config = config_of(folder)

    def compare() -> None:
        convert_check.compare_with_transformers(
            folder, convert_check.logits, lambda: load_params(other, config), config
        )

    with pytest.raises(ConversionError, match="jaxrl and transformers disagree"):
        compare()
    monkeypatch.setattr(convert_check, "memory_available", lambda: 1000.0)
    compare()
    assert "transformers was not compared: both models need" in capsys.readouterr().out
