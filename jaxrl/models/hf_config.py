"""Reading a Hugging Face `config.json`: what each entry means, and which ones are refused.

An entry that changes the maths in a way the decoder does not know stops the reading by name; one
that is about training, generation or bookkeeping (dropout, cache, token ids) is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.models.rope import RopeConfig, read_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Hugging Face `model_type` to architecture: the families that one decoder covers."""

# Entries that change the maths in ways the decoder does not know, and the values that are harmless.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "rope_interleave": (False,),
    "use_mrope": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "no_rope_layers": ([],),
    "cross_attention_layers": ([],),
    "vision_config": (),
    "text_config": (),
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Sizes that every config must state."""


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `ModelConfig` from a Hugging Face config; defaults are those of transformers.

    Args:
        config: the parsed `config.json`, as transformers 4 or 5 writes it.

    Raises:
        ConfigError: naming the entry that is missing, unknown or not supported.
    """
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"model_type={family!r} is not supported; it must be one of {tuple(ARCHITECTURES)}"
        )
    _refuse(config, family)
    for name in SIZES:
        value = config.get(name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
    fields = {name: config[name] for name in SIZES}
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = _get(
        config, "num_key_value_heads", 8 if family == "mistral" else heads
    )
    head_dim = 128 if family == "qwen3" else fields["hidden_size"] // heads
    fields["head_dim"] = _get(config, "head_dim", head_dim)
    fields["rms_norm_eps"] = float(_get(config, "rms_norm_eps", 1e-6))
    fields["initializer_range"] = float(_get(config, "initializer_range", 0.02))
    longest = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}[family]
    fields["max_position_embeddings"] = int(_get(config, "max_position_embeddings", longest))
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        fields[name] = bool(_get(config, name, False))
    if family == "qwen2" and fields["attention_bias"]:
        fields["attention_bias"] = False  # implied by the family, and harmless when stated
    fields["windows"] = _read_windows(config, family)
    fields["rope"] = _read_rope(config, fields["max_position_embeddings"])
    return {"model_type": family, **fields}


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _refuse(config: Mapping[str, Any], family: str) -> None:
    for architecture in config.get("architectures") or ():
        if architecture != ARCHITECTURES[family]:
            raise ConfigError(
                f"architectures={config['architectures']!r} is not supported; model_type"
                f" {family!r} is read as {ARCHITECTURES[family]}"
            )
    for name, harmless in _REFUSED.items():
        value = config.get(name)
        if value is not None and value not in harmless:
            allowed = " or ".join(repr(choice) for choice in harmless) or "absent"
            raise ConfigError(f"{name}={value!r} is not supported; it must be {allowed}")
    activation = _get(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act={activation!r} is not supported; it must be 'silu'")


def _read_windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """One window a layer from `sliding_window`, `max_window_layers` or `layer_types`."""
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096 if family in ("mistral", "qwen2", "qwen3") else None)
    kinds = config.get("layer_types")
    if family in ("qwen2", "qwen3"):
        window = window if config.get("use_sliding_window") else None
        if kinds is None:
            full = _get(config, "max_window_layers", 28)
            kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
            kinds = kinds if window is not None else ["full_attention"] * layers
    elif kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types has {kind!r}; only 'full_attention' and 'sliding_attention' are"
                " supported"
            )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types has 'sliding_attention' but sliding_window is not in use")
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window={window!r} must be at least 1, or null")
    return tuple(window if window and kind == "sliding_attention" else 0 for kind in kinds)


def _read_rope(config: Mapping[str, Any], longest: int) -> RopeConfig:
    """The rope entry: transformers 5's `rope_parameters`, or 4's `rope_theta` + `rope_scaling`."""
    new, old = dict(config.get("rope_parameters") or {}), dict(config.get("rope_scaling") or {})
    for entry in (new, old):
        if "type" in entry:
            entry.setdefault("rope_type", entry.pop("type"))
    for name, value in {**new, **old}.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"rope_parameters.{name}: one rope a layer type is not supported")
    theta = config.get("rope_theta")
    if theta is not None:
        old.setdefault("rope_theta", theta)
    entry = {**old, **new}
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ConfigError(
                f"{name}={old[name]!r} (rope_theta, rope_scaling) and {new[name]!r}"
                " (rope_parameters) disagree; make them equal or remove one"
            )
    # transformers gives the top-level entry precedence, and falls back to the whole length.
    original = config.get("original_max_position_embeddings")
    if original is not None:
        entry["original_max_position_embeddings"] = original
    entry.setdefault("original_max_position_embeddings", longest)
    return read_rope(entry)
