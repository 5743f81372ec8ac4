"""Hugging Face folders in: what is read, and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxrl.checkpoint.hf import check_tokenizer_fits, load_hf_config, load_params
from jaxrl.errors import ConversionError
from tests.checkpoint.families import (
    FAMILIES,
    TOKENS,
    Folder,
    assert_same_tree,
    config_of,
    our_logits,
    torch_logits,
)


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Folder:
    """Gives a copy of a family's folder that a test may damage."""

    def copied(family: str) -> Path:
        return Path(shutil.copytree(tiny_folder(family), tmp_path / family))

    return copied


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tiny_folder: Folder) -> None:
    folder = tiny_folder(family)
    params = load_params(folder, config_of(folder))
    ours = our_logits(params, config_of(folder), TOKENS)
    np.testing.assert_allclose(ours, torch_logits(folder, TOKENS), atol=1e-4, rtol=0)


def test_shards_give_the_same_parameters_as_one_file(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("qwen3-untied")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    whole, parts = (load_params(f, config_of(folder)) for f in (folder, tmp_path))
    assert_same_tree(whole, parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_read_exactly(
    dtype: torch.dtype, copy: Folder, tiny_folder: Folder
) -> None:
    folder = copy("llama-tied")
    edit(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    params = load_params(folder, config_of(folder))
    original = load_file(tiny_folder("llama-tied") / "model.safetensors")
    expected = original["model.embed_tokens.weight"].to(dtype).float().numpy()
    assert params["embed"]["weight"].dtype == np.float32
    np.testing.assert_array_equal(params["embed"]["weight"], expected)


def test_dtype_of_the_parameters_can_be_chosen(tiny_folder: Folder) -> None:
    folder = tiny_folder("llama-tied")
    params = load_params(folder, config_of(folder), dtype="bfloat16")
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert params["embed"]["weight"].dtype.name == "bfloat16"
    expected = embed.bfloat16().float().numpy()
    np.testing.assert_array_equal(params["embed"]["weight"].astype(np.float32), expected)


def test_without_head_only_the_head_is_left_out(tiny_folder: Folder) -> None:
    folder = tiny_folder("mistral-untied")
    whole = load_params(folder, config_of(folder))
    trunk = load_params(folder, config_of(folder), with_head=False)
    assert set(whole) - set(trunk) == {"head"}
    assert_same_tree({name: whole[name] for name in trunk}, trunk)


def test_all_faults_are_listed_at_once(copy: Folder) -> None:
    """HF-09: nothing is filled in, nothing is dropped."""
    folder = copy("llama-untied")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["foo.weight"] = torch.zeros(2, 3)
        tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(32, 16)
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(32, dtype=torch.int8)

    edit(folder, damage)
    with pytest.raises(ConversionError) as caught:
        load_params(folder, config_of(folder))
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert sorted(lines[1:]) == [
        "missing: model.layers.1.mlp.up_proj.weight",
        "missing: model.norm.weight",
        "unexpected: foo.weight [2, 3]",
        "wrong shape: model.layers.2.self_attn.k_proj.weight [32, 16], expected [16, 32]",
        "wrong type: model.layers.0.input_layernorm.weight I8, expected one of F32, BF16, F16, F64",
    ]
    assert str(folder) in lines[0] and "5 tensor(s)" in lines[0]


def test_a_missing_head_says_what_the_config_could_be(copy: Folder) -> None:
    folder = copy("llama-untied")
    edit(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(ConversionError, match="(?s)missing: lm_head.*tie_word_embeddings: true"):
        load_params(folder, config_of(folder))


def test_stored_rotary_frequencies_are_passed_over(copy: Folder, tiny_folder: Folder) -> None:
    folder = copy("llama-tied")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    whole = load_params(tiny_folder("llama-tied"), config_of(folder))
    assert_same_tree(load_params(folder, config_of(folder)), whole)


def test_a_tied_head_may_be_stored_but_not_differ(copy: Folder) -> None:
    """HF-02: one of two different matrices would be lost in silence."""
    folder = copy("qwen2-tied")
    embed = "model.embed_tokens.weight"
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embed].clone()}))
    params = load_params(folder, config_of(folder))
    assert "head" not in params
    edit(folder, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1e-3))
    with pytest.raises(ConversionError, match="lm_head.weight .* is not equal to model.embed"):
        load_params(folder, config_of(folder))


def test_a_file_cut_short_is_named(copy: Folder) -> None:
    """HF-05: the tail must not read as zeros."""
    folder = copy("llama-tied")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1024)
    with pytest.raises(ConversionError, match="model.safetensors is cut short"):
        load_params(folder, config_of(folder))


def test_a_shard_cut_short_or_missing_is_named(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("llama-tied")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    os.truncate(second, second.stat().st_size - 1024)
    with pytest.raises(ConversionError, match=f"{second.name} is cut short"):
        load_params(tmp_path, config_of(folder))
    second.unlink()
    with pytest.raises(ConversionError, match=f"names files that are missing: .*{second.name}"):
        load_params(tmp_path, config_of(folder))


def test_a_tensor_in_two_shards_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    tensors = load_file(tiny_folder("llama-tied") / "model.safetensors")
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match="model.norm.weight is both in .*a.safe.*b.safe"):
        load_params(tmp_path, config_of(tiny_folder("llama-tied")))


def test_an_index_without_a_map_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConversionError, match="index.json has no weight_map"):
        load_params(tmp_path, config_of(tiny_folder("llama-tied")))


def test_pickled_weights_are_refused_with_advice(tiny_folder: Folder, tmp_path: Path) -> None:
    config = config_of(tiny_folder("llama-tied"))
    with pytest.raises(ConversionError, match="give a folder that holds safetensors"):
        load_params(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match="pytorch_model.bin: pickled weights are not read"):
        load_params(tmp_path, config)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is no folder"):
        load_hf_config(tmp_path / "absent")
    with pytest.raises(ConversionError, match="has no config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ConversionError, match="config.json is not readable JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConversionError, match="must hold a JSON object, not list"):
        load_hf_config(tmp_path)


class _Vocabulary:
    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def test_a_tokenizer_larger_than_the_embedding_is_refused(tiny_folder: Folder) -> None:
    """TK-12: JAX would clamp the index and read another token's row."""
    config = config_of(tiny_folder("llama-tied"))
    check_tokenizer_fits(_Vocabulary({"a": 0, "b": 60}), config)
    with pytest.raises(ConversionError, match=r"id 61 \('\[PAD\]'\) >= the model's vocab_size 61"):
        check_tokenizer_fits(_Vocabulary({"a": 0, "[PAD]": 61, "b": 60}), config)


def test_reading_loads_no_torch(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama-tied"))
    code = (
        "import sys\n"
        "from jaxrl.checkpoint.hf import load_hf_config, load_params\n"
        "from jaxrl.checkpoint.hf_export import export_hf\n"
        "from jaxrl.models import ModelConfig\n"
        "folder, out = sys.argv[1:]\n"
        "config = ModelConfig.from_hf(load_hf_config(folder))\n"
        "export_hf(out, load_params(folder, config), config, source=folder)\n"
        "print(sorted(sys.modules.keys() & {'torch', 'transformers', 'orbax'}))\n"
    )
    command = [sys.executable, "-c", code, folder, folder + "-copy"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
