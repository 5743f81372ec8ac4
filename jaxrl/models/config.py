"""What a decoder is made of: `ModelConfig`, read from and written to a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import ConfigError, ConversionError
from jaxrl.models.hf_config import ARCHITECTURES, SIZES, read_config
from jaxrl.models.rope import RopeConfig


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
        for name in (*SIZES, "num_key_value_heads", "head_dim"):
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
            return cls(**read_config(config))
        except ConfigError as error:
            raise ConversionError(f"Hugging Face config: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The same model as a Hugging Face config that transformers 4 and 5 both read."""
        rope = self.rope.to_hf()
        scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in (*SIZES, "num_key_value_heads", "head_dim")},
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
