"""What a decoder is made of: `ModelConfig`, read from and written to a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import ConfigError, ConversionError
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

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of one decoder; static under `jit`. Field names are Hugging Face's."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Independent of hidden_size / num_attention_heads."""
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """llama, qwen3: biases of q, k, v and o. qwen2 always has those of q, k, v, and only those."""
    mlp_bias: bool = False
    """llama: biases of gate, up and down."""
    windows: tuple[int, ...] = ()
    """A layer's sliding window in tokens, the query's own included; 0: none. (): none anywhere."""
    max_position_embeddings: int = 2048
    """Kept for export; positions are not limited by it."""
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built, naming the field."""
        if self.model_type not in ARCHITECTURES:
            raise ConfigError(
                f"model_type={self.model_type!r} is not supported; it must be one of"
                f" {tuple(ARCHITECTURES)}"
            )
        for name in (*_SIZES, "num_key_value_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} must divide"
                f" num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rope turns pairs")
        if self.windows and len(self.windows) != self.num_hidden_layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries for"
                f" num_hidden_layers={self.num_hidden_layers}; give one a layer, or none"
            )
        if self.windows and not any(self.windows):
            object.__setattr__(self, "windows", ())
        if (
            len({window for window in self.windows if window}) > 1
            or min(self.windows, default=0) < 0
        ):
            raise ConfigError(f"windows={self.windows}: use one positive window, and 0 for none")
        self._check_family()

    def _check_family(self) -> None:
        """Refuse what the family's published architecture has no place for."""
        if self.attention_bias and self.model_type not in ("llama", "qwen3"):
            raise ConfigError(f"attention_bias=True: {self.model_type} has no such setting")
        if self.mlp_bias and self.model_type != "llama":
            raise ConfigError(f"mlp_bias=True: {self.model_type} has no such setting")
        if self.windows and self.model_type == "llama":
            raise ConfigError("a sliding window: llama has no such setting")
        if self.model_type == "mistral" and len(set(self.windows)) > 1:
            raise ConfigError(f"windows={self.windows}: mistral has one window for all layers")

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised a head, before rope."""
        return self.model_type == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`, as transformers 4 or 5 writes it.

        Args:
            config: the parsed file.

        Raises:
            ConversionError: naming the entry that is missing, unknown or not supported.
        """
        try:
            return cls(**_read(config))
        except ConfigError as error:
            raise ConversionError(f"Hugging Face config: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The same model as a Hugging Face config that transformers 4 and 5 both read."""
        rope = self.rope.to_hf()
        scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in (*_SIZES, "num_key_value_heads", "head_dim")},
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": None if self.rope.rope_type == "default" else scaled,
            "rope_parameters": rope,
        }
        if self.model_type in ("llama", "qwen3"):
            config["attention_bias"] = self.attention_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.model_type == "mistral":
            config["sliding_window"] = self.windows[0] if self.windows else None
        if self.model_type in ("qwen2", "qwen3"):
            config |= self._qwen_windows()
        return config

    def _qwen_windows(self) -> dict[str, Any]:
        windows = self.windows or (0,) * self.num_hidden_layers
        names = ["sliding_attention" if window else "full_attention" for window in windows]
        first = next((i for i, window in enumerate(windows) if window), self.num_hidden_layers)
        return {
            "use_sliding_window": bool(self.windows),
            "sliding_window": max(windows) or None,
            "max_window_layers": first,
            "layer_types": names,
        }


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments from a Hugging Face config; defaults are those of transformers."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise ConfigError(
            f"model_type={family!r} is not supported; it must be one of {tuple(ARCHITECTURES)}"
        )
    _refuse(config, family)
    for name in _SIZES:
        if config.get(name) is None:
            raise ConfigError(f"{name} is missing")
    fields = {name: config[name] for name in _SIZES}
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
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


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
