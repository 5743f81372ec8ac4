"""Hugging Face folders out: equal in every bit, complete, and there whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig
from tests.checkpoint.families import (
    FAMILIES,
    TOKENS,
    Folder,
    assert_same_tree,
    config_of,
    torch_logits,
)


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(family: str, tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder(family), tmp_path / "out"
    config = config_of(source)
    export_hf(out, load_params(source, config), config, source=source)
    before, after = tensors_in(source), tensors_in(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == np.float32
        np.testing.assert_array_equal(after[name], tensor, err_msg=name)
    np.testing.assert_allclose(
        torch_logits(out, TOKENS), torch_logits(source, TOKENS), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_our_own_loads_as_the_same_model(
    family: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    source, out = tiny_folder(family), tmp_path / "out"
    config = config_of(source)
    export_hf(out, load_params(source, config), config)
    assert config_of(out) == config
    assert load_hf_config(out)["tie_word_embeddings"] is FAMILIES[family]["tie_word_embeddings"]
    np.testing.assert_allclose(
        torch_logits(out, TOKENS), torch_logits(source, TOKENS), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-untied"])
def test_changed_parameters_arrive_changed(
    family: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """HF-02: what was trained, tied or not, is what is read back."""
    source, out = tiny_folder(family), tmp_path / "out"
    config = config_of(source)
    params = jax.tree.map(lambda x: jnp.asarray(x) * 1.01 + 0.003, load_params(source, config))
    export_hf(out, params, config, source=source)
    assert_same_tree(load_params(out, config), jax.tree.map(np.asarray, params))
    difference = np.abs(torch_logits(out, TOKENS) - torch_logits(source, TOKENS)).max()
    assert difference > 1e-2


def test_transposed_kernels_are_written_in_index_order(tiny_folder: Folder, tmp_path: Path) -> None:
    """HF-06: the bytes on disk, read without any library, are those of Hugging Face's layout."""
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    config = config_of(source)
    params = load_params(source, config)
    params["layers"]["mlp"]["gate"]["kernel"] = np.arange(3 * 32 * 48, dtype=np.float32).reshape(
        3, 32, 48
    )
    export_hf(out, params, config)
    raw = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])["model.layers.1.mlp.gate_proj.weight"]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    written = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"])
    assert entry["shape"] == [48, 32]
    # Layer 1 starts at 32 * 48 = 1536; going down a column of ours is going along a row of theirs.
    assert written[0, :3].tolist() == [1536, 1536 + 48, 1536 + 96]
    assert written[1, 0] == 1537


def test_bfloat16_export_rounds_each_weight_once(tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder("qwen2-tied"), tmp_path / "out"
    config = config_of(source)
    export_hf(out, load_params(source, config), config, source=source, dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source).to(torch.bfloat16)
    assert load_hf_config(out)["dtype"] == "bfloat16"
    assert loaded.dtype == torch.bfloat16
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_large_exports_are_sharded_with_an_index(tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder("mistral-untied"), tmp_path / "out"
    config = config_of(source)
    params = load_params(source, config)
    export_hf(out, params, config, source=source, max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (out / "model.safetensors").exists()
    for path in shards:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
        assert all(index["weight_map"][name] == path.name for name in tensors)
    total = sum(tensor.nbytes for tensor in tensors_in(source).values())
    assert index["metadata"]["total_size"] == total
    assert_same_tree(load_params(out, config), params)
    np.testing.assert_allclose(
        torch_logits(out, TOKENS), torch_logits(source, TOKENS), atol=1e-5, rtol=0
    )


def test_a_served_folder_has_everything_of_its_source(tiny_folder: Folder, tmp_path: Path) -> None:
    """HF-07: config, generation config, tokenizer and chat template, equal but for the dtype."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(tiny_folder("qwen3-tied"), source)
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "the", "cat", "sat"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}the {{ m['content'] }}{% endfor %}"
    fast.save_pretrained(source)
    generation = {"eos_token_id": [1, 2], "temperature": 0.7, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "pytorch_model.bin").write_bytes(b"left behind")

    config = config_of(source)
    export_hf(out, load_params(source, config), config, source=source, dtype="bfloat16")

    left_behind = {"pytorch_model.bin"}
    assert {p.name for p in source.iterdir()} - left_behind == {p.name for p in out.iterdir()}
    before, after = load_hf_config(source), load_hf_config(out)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"dtype"}
    assert json.loads((out / "generation_config.json").read_text()) == generation
    chat = [{"role": "user", "content": "cat sat"}]
    ids = [
        transformers.AutoTokenizer.from_pretrained(f).apply_chat_template(chat, return_dict=False)
        for f in (source, out)
    ]
    assert ids[0] == ids[1] == [2, 3, 4]


def test_without_a_generation_config_the_ids_come_from_the_config(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_folder("llama-tied"), source)
    (source / "generation_config.json").unlink(missing_ok=True)
    config = config_of(source)
    out = export_hf(tmp_path / "out", load_params(source, config), config, source=source)
    written = json.loads((out / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_a_value_head_stays_behind(tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    config = config_of(source)
    params: dict[str, Any] = load_params(source, config)
    params["value_head"] = {"kernel": np.ones((32, 1)), "bias": np.ones(1)}
    export_hf(out, params, config, source=source)
    assert tensors_in(out).keys() == tensors_in(source).keys()


def test_parameters_that_do_not_fit_are_listed_and_nothing_is_written(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    config = config_of(source)
    params: dict[str, Any] = load_params(source, config)
    del params["layers"]["mlp"]["up"]
    params["norm"]["scale"] = np.ones(31, np.float32)
    params["head"] = {"kernel": np.zeros((32, 61), np.float32)}  # config says tied
    with pytest.raises(ConversionError) as caught:
        export_hf(out, params, config)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert sorted(lines[1:]) == [
        "missing: layers.mlp.up.kernel",
        "unexpected: head.kernel [32, 61]",
        "wrong shape: norm.scale [31], expected [32]",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_source_must_be_the_same_model(tiny_folder: Folder, tmp_path: Path) -> None:
    source = tiny_folder("llama-tied")
    config = config_of(source)
    with pytest.raises(ConversionError, match="describes another model"):
        export_hf(
            tmp_path / "out", load_params(source, config), config, source=tiny_folder("qwen2-tied")
        )


class _Failing:
    """A leaf of the right shape that cannot be fetched."""

    shape = (32,)

    def __getitem__(self, index: Any) -> np.ndarray:
        raise RuntimeError("device lost")


def test_a_failed_export_leaves_the_old_one_alone(tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    config: ModelConfig = config_of(source)
    params: dict[str, Any] = load_params(source, config)
    export_hf(out, params, config, source=source)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(RuntimeError, match="device lost"):
        export_hf(out, {**params, "norm": {"scale": _Failing()}}, config, source=source)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_older_export_is_replaced_whole(tiny_folder: Folder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    config = config_of(source)
    params = load_params(source, config)
    export_hf(out, params, config, source=source, max_shard_bytes=20_000)
    export_hf(out, params, config, source=source)
    assert not list(out.glob("*index.json")) and not list(out.glob("model-*"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_things_is_not_replaced(tiny_folder: Folder, tmp_path: Path) -> None:
    source = tiny_folder("llama-tied")
    config = config_of(source)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConversionError, match="exists and is no model folder"):
        export_hf(tmp_path, load_params(source, config), config)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' cannot be written"),
        ({"max_shard_bytes": 0}, "max_shard_bytes=0 must be positive"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    source = tiny_folder("llama-tied")
    config = config_of(source)
    with pytest.raises(ConversionError, match=message):
        export_hf(tmp_path / "out", load_params(source, config), config, **settings)
    assert list(tmp_path.iterdir()) == []
