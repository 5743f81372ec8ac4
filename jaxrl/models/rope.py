"""Rotary position embeddings: inverse frequencies of the four supported types, tables, rotation.

The frequencies depend on the config alone, so they are worked out on the host in float64 and
rounded once; angles are then float32 products of integer positions, whatever the compute dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# What each type cannot do without, beside theta.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings, named as in Hugging Face's `rope_parameters`.

    Fields that the type does not use stay at their defaults (0: not given), so equal settings
    compare equal.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 0.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    """llama3: wavelengths above original / low_freq_factor are slowed by `factor`."""
    high_freq_factor: float = 0.0
    """llama3: wavelengths below original / high_freq_factor are kept."""
    attention_factor: float | None = None
    """yarn: multiplier of cos and sin; None: derived from factor, mscale and mscale_all_dim."""
    beta_fast: float = 32.0
    """yarn: rotations over the original length above which a frequency is kept."""
    beta_slow: float = 1.0
    """yarn: rotations over the original length below which a frequency is divided by factor."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    """yarn: round the ends of the ramp to whole dimensions."""

    def __post_init__(self) -> None:
        """Refuse an unknown type, a missing entry, or a number out of range, by name."""
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type={self.rope_type!r} is not supported; it must be one of {ROPE_TYPES}"
            )
        for name in ("rope_theta", *_REQUIRED[self.rope_type]):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(
                    f"rope_parameters.{name}={value!r}: rope_type {self.rope_type!r} needs a"
                    " positive number here"
                )
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ConfigError(
                f"rope_parameters.high_freq_factor={self.high_freq_factor} must be larger than"
                f" low_freq_factor={self.low_freq_factor}"
            )

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` entry of a Hugging Face config: only what the type reads."""
        entry: dict[str, Any] = {"rope_type": self.rope_type, "rope_theta": self.rope_theta}
        for name in _REQUIRED[self.rope_type]:
            entry[name] = getattr(self, name)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if self.rope_type == "yarn" and value != field.default:
                entry[field.name] = value
        return entry


def read_rope(entry: Mapping[str, Any]) -> RopeConfig:
    """`RopeConfig` from a flat `rope_parameters` entry; what another type reads is left out.

    Raises:
        ConfigError: an entry that no supported type knows, or a refused type or value.
    """
    entry = {name: value for name, value in entry.items() if value is not None}
    rope_type = entry.pop("rope_type", entry.pop("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type={rope_type!r} is not supported; it must be one of {ROPE_TYPES}"
        )
    names = {field.name: field.type for field in dataclasses.fields(RopeConfig)}
    for name, value in entry.items():
        if name == "partial_rotary_factor" and value == 1:
            continue
        if name not in names:
            raise ConfigError(
                f"rope_parameters.{name}={value!r} is not supported (rope_type {rope_type!r});"
                f" known entries: {', '.join(names)}"
            )
    used = ["rope_theta", *_REQUIRED[rope_type]]
    if rope_type == "yarn":
        used += ["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]
        used += ["truncate"]
    kept = {name: _number(names[name], entry[name]) for name in used if name in entry}
    return RopeConfig(rope_type=rope_type, **kept)


def _number(annotation: Any, value: Any) -> Any:
    """JSON writes 1000000 and 1000000.0 alike: floats where the field is a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return float(value) if "float" in str(annotation) else int(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of dimensions, ωᵢ = θ^(−2i/d) before scaling.

    linear: ω/f. llama3: with wavelength λ = 2π/ω and original length N, ω where λ < N/high,
    ω/f where λ > N/low, and between them (1 − s) ω/f + s ω with s = (N/λ − low)/(high − low).
    yarn: (1 − r) ω + r ω/f, with r a ramp over the dimensions from the one that turns
    beta_fast times over the original length to the one that turns beta_slow times.

    Args:
        rope: settings.
        head_dim: size of a head, even.

    Returns:
        float32 [head_dim / 2], radians per position.

    Reference: Su et al. 2021 (RoFormer); Peng et al. 2023 (YaRN), section 3; Llama 3.1.

    >>> inverse_frequencies(RopeConfig(rope_theta=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
    """
    plain = rope.rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "linear":
        plain = plain / rope.factor
    elif rope.rope_type == "llama3":
        plain = _llama3(rope, plain)
    elif rope.rope_type == "yarn":
        plain = _yarn(rope, plain, head_dim)
    return plain.astype(np.float32)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return (1 - ramp) * plain + ramp * plain / rope.factor


def attention_factor(rope: RopeConfig) -> float:
    """Multiplier of cos and sin: 1 but for yarn, where it is given or 0.1 ln(factor) + 1.

    With mscale m and mscale_all_dim a both set: (0.1 m ln f + 1) / (0.1 a ln f + 1).
    """
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "batch time"]
) -> tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]]:
    """Cosines and sines of the angles, float32, already times the attention factor."""
    frequencies = inverse_frequencies(rope, head_dim)[None, None, :]
    angles = positions[..., None].astype(jnp.float32) * frequencies
    factor = attention_factor(rope)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "batch time heads head_dim"],
    cos: Float[Array, "batch time half"],
    sin: Float[Array, "batch time half"],
) -> Float[Array, "batch time heads head_dim"]:
    """Turn dimension i and i + head_dim/2 of every head by the angle; float32, then x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
