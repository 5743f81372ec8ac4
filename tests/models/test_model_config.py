"""Reading Hugging Face configs: transformers 4 and 5 styles, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl.errors import ConfigError, ConversionError
from jaxrl.models import ModelConfig, RopeConfig

BASE: dict[str, Any] = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
)


def read(**entries: Any) -> ModelConfig:
    config = {**BASE, **entries}
    if config["model_type"] != "llama" and "architectures" not in entries:
        del config["architectures"]
    return ModelConfig.from_hf(config)


def test_defaults_are_those_of_transformers() -> None:
    llama = read()
    assert (llama.num_key_value_heads, llama.head_dim) == (4, 8)
    assert llama.rope == RopeConfig() and llama.windows == ()
    assert not (llama.tie_word_embeddings or llama.qkv_bias or llama.output_bias or llama.qk_norm)
    qwen3 = read(model_type="qwen3")
    assert qwen3.head_dim == 128 and qwen3.qk_norm and not qwen3.qkv_bias
    qwen2 = read(model_type="qwen2")
    assert qwen2.qkv_bias and not qwen2.output_bias and not qwen2.qk_norm
    mistral = read(model_type="mistral", num_key_value_heads=2)
    assert mistral.windows == (4096,) * 4
    biased = read(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias and biased.output_bias and biased.mlp_bias


def test_old_and_new_rope_entries_say_the_same() -> None:
    scaling = dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    old = read(rope_theta=500000, rope_scaling={"rope_type": "llama3", **scaling})
    older = read(rope_theta=500000, rope_scaling={"type": "llama3", **scaling})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling})
    both = read(**old.to_hf())
    assert old == older == new == both
    assert new.rope.rope_theta == 500000.0 and new.rope.factor == 8.0


def test_windows_of_qwen() -> None:
    common = dict(model_type="qwen2", sliding_window=16)
    assert read(**common).windows == ()
    assert read(**common, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 16)
    kinds = ["sliding_attention", "full_attention"] * 2
    explicit = read(**common, use_sliding_window=True, max_window_layers=3, layer_types=kinds)
    assert explicit.windows == (16, 0, 16, 0)
    assert ModelConfig.from_hf(explicit.to_hf()) == explicit
    # transformers switches the window off before it looks at max_window_layers
    assert read(**common, use_sliding_window=False, max_window_layers=0).windows == ()


def test_every_field_survives_the_round_trip() -> None:
    config = read(
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        max_position_embeddings=512,
        initializer_range=0.01,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=5e4,
            factor=2.0,
            original_max_position_embeddings=256,
            attention_factor=1.5,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.5,
            mscale_all_dim=0.25,
            truncate=False,
        ),
    )
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert hash(config) == hash(ModelConfig.from_hf(config.to_hf()))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (dict(model_type="gemma2"), "model_type='gemma2'"),
        (dict(model_type=None), "model_type=None"),
        (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (dict(quantization_config={}), "quantization_config"),
        (dict(pretraining_tp=2), "pretraining_tp=2"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(num_local_experts=8), "num_local_experts=8"),
        (dict(model_type="qwen3", num_experts=4), "num_experts=4"),
        (dict(model_type="qwen2", use_mrope=True), "use_mrope=True"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type='dynamic'"),
        (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "full_attention"),
        (
            dict(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
            "rope_theta=10000.0 .* 1000000.0 .* disagree",
        ),
        (dict(vocab_size=None), "vocab_size=None"),
        (dict(hidden_size="32"), "hidden_size='32'"),
        (dict(num_attention_heads=0), "num_attention_heads=0"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3 must divide"),
        (dict(head_dim=7), "head_dim=7 must be even"),
        (dict(sliding_window=8), "sliding window"),
        (dict(model_type="mistral", num_key_value_heads=4, sliding_window=0), "sliding_window=0"),
        (dict(model_type="mistral", num_key_value_heads=4, attention_bias=True), "attention_bias"),
        (dict(model_type="qwen2", layer_types=["full_attention"]), "layer_types has 1 entries"),
        (dict(model_type="qwen2", layer_types=["linear_attention"] * 4), "linear_attention"),
        (dict(model_type="qwen2", layer_types=["sliding_attention"] * 4), "not in use"),
    ],
)
def test_refusals_name_the_entry(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        read(**entries)


def test_bookkeeping_entries_are_passed_over() -> None:
    assert (
        read(
            torch_dtype="bfloat16",
            transformers_version="4.40.0",
            bos_token_id=1,
            eos_token_id=[2, 3],
            use_cache=True,
            pretraining_tp=1,
            rope_interleaved=False,
            attention_dropout=0.0,
            hidden_act="silu",
        )
        == read()
    )


def test_direct_construction_is_checked_too() -> None:
    sizes = dict(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    assert ModelConfig("qwen3", **sizes, windows=(0, 0)).windows == ()
    with pytest.raises(ConfigError, match="one positive window"):
        ModelConfig("qwen3", **sizes, windows=(2, 3))
    with pytest.raises(ConfigError, match="3 entries"):
        ModelConfig("qwen3", **sizes, windows=(2, 3, 0))
    with pytest.raises(ConfigError, match="one window for all layers"):
        ModelConfig("mistral", **sizes, windows=(2, 0))
    with pytest.raises(ConfigError, match="mlp_bias"):
        ModelConfig("qwen3", **sizes, mlp_bias=True)
