"""GGUF in: a tiny file written here, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from jaxrl.checkpoint.gguf import convert_gguf, unpermute
from jaxrl.checkpoint.hf import load_hf_config
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig
from tests.checkpoint.tiny_gguf import permuted, weights, write_gguf


def test_unpermute_undoes_the_interleaving_of_halves() -> None:
    # One head of four rows: halves (0, 1) and (2, 3) lie as 0 2 1 3 in GGUF.
    stored = np.array([[0.0], [2.0], [1.0], [3.0]])
    assert unpermute(stored, 1).ravel().tolist() == [0, 1, 2, 3]
    weight = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(unpermute(permuted(weight, 3), 3), weight)


def test_weights_arrive_in_bfloat16_in_the_layout_of_hugging_face(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = weights()
    assert len(tensors) == len(expected) == 20
    for theirs, ours in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
        "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
        "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
        "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
    }.items():
        rounded = expected[theirs].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(tensors[f"{ours}.weight"], rounded, err_msg=ours)


def test_quantised_weights_are_dequantised_before_their_rows_move(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", quantized="blk.0.attn_q")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    kind = GGMLQuantizationType.Q8_0
    original = weights()["blk.0.attn_q"]
    # Blocks of 32 lie along a row, so quantising commutes with moving rows.
    expected = dequantize(quantize(original, kind), kind).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"], expected)


def test_transformers_and_our_config_read_the_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    config = ModelConfig.from_hf(load_hf_config(tmp_path / "out"))
    assert config.rope.rope_theta == 50000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and config.num_hidden_layers == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.rope_parameters == {"rope_theta": 50000.0, "rope_type": "default"}
    assert model.generation_config.eos_token_id == [2]
    assert model.generation_config.pad_token_id == 2


def test_the_tokenizer_splits_digits_and_keeps_the_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    # The merge "1 2" exists, but digits never stand in one piece.
    assert tokenizer.tokenize("ab 12<|im_end|>") == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("ab 12")["input_ids"]) == "ab 12"
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (1, 2, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False)
    assert text == "<|im_start|>cab<|im_end|>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture='gemma3' is not supported"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe' is not supported"),
        ({"extra": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' is not part of"),
    ],
)
def test_other_files_are_refused_by_name(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", **settings)
    with pytest.raises(ConversionError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_head_makes_the_model_untied(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra="output.weight")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert load_hf_config(tmp_path / "out")["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_missing_foreign_and_cut_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(ConversionError, match="tiny.gguf is no file"):
        convert_gguf(path, tmp_path / "out")
    path.write_bytes(b"not a model at all, but long enough to hold a header")
    with pytest.raises(ConversionError, match="tiny.gguf is not a complete GGUF file"):
        convert_gguf(path, tmp_path / "out")
    write_gguf(path)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(ConversionError, match="tiny.gguf is not a complete GGUF file"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
