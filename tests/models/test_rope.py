"""Rotary embeddings: the published frequencies, float32 angles, and the rotation itself."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.models import RopeConfig
from jaxrl.models.rope import (
    attention_factor,
    inverse_frequencies,
    read_rope,
    rope_tables,
    rotate,
)

LLAMA3 = RopeConfig(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)


def test_llama3_frequencies() -> None:
    """MM-03: scaling that is declared is applied; the first frequencies stay, the last are / 8."""
    frequencies = inverse_frequencies(LLAMA3, 128)
    expected = {
        0: 1.0,
        28: 0.00321144599,
        29: 0.00216657076,
        30: 0.00137189357,
        32: 0.000524846161,
        34: 0.000178507813,
        35: 9.55621235e-05,
        63: 3.06892599e-07,
    }
    for index, value in expected.items():
        assert frequencies[index] == pytest.approx(value, rel=1e-5)


def test_yarn_frequencies_and_factor() -> None:
    """MM-04: the factor is 0.1 ln 4 + 1, once; an explicit one is taken as it is."""
    rope = RopeConfig(**YARN)
    frequencies = inverse_frequencies(rope, 128)
    for index, value in {
        22: 0.00865964323,
        30: 0.00106436098,
        32: 0.000602941176,
        40: 4.44569853e-05,
    }.items():
        assert frequencies[index] == pytest.approx(value, rel=1e-5)
    assert attention_factor(rope) == pytest.approx(1.138629, rel=1e-6)
    assert attention_factor(RopeConfig(**YARN, attention_factor=1.0)) == 1.0
    cos, sin = rope_tables(rope, 128, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, 1.138629, rtol=1e-6)  # cos 0 = 1, times the factor
    assert not sin.any()


def test_linear_divides_every_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(), 8)
    np.testing.assert_allclose(plain, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)  # 10000^(-2i/8)
    scaled = inverse_frequencies(RopeConfig(rope_type="linear", factor=4.0), 8)
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)
    assert attention_factor(LLAMA3) == attention_factor(RopeConfig()) == 1.0


@pytest.mark.parametrize("position", [257, 1001, 4099])
def test_angles_are_float32(position: int) -> None:
    """MM-11: bfloat16 would round these positions to a neighbour."""
    rope = RopeConfig()
    cos, sin = rope_tables(rope, 64, jnp.array([[position - 1, position]], jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    angle = position * 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(cos[0, 1], np.cos(angle), atol=3e-4)
    np.testing.assert_allclose(sin[0, 1], np.sin(angle), atol=3e-4)
    assert abs(cos[0, 1] - cos[0, 0]).max() > 0.1


def test_rotation_by_hand() -> None:
    """Dimensions i and i + half are a pair: (3, 4) turned by 90 degrees is (-4, 3)."""
    x = jnp.array([3.0, 1.0, 4.0, 2.0]).reshape(1, 1, 1, 4)
    cos, sin = jnp.array([[[0.0, 1.0]]]), jnp.array([[[1.0, 0.0]]])
    np.testing.assert_allclose(rotate(x, cos, sin).ravel(), [-4.0, 1.0, 3.0, 2.0], atol=1e-7)


def test_scores_depend_on_distance_only() -> None:
    """<R(p) q, R(s) k> = <R(p + n) q, R(s + n) k>."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(p: int, s: int) -> float:
        turned = [
            rotate(x, *rope_tables(LLAMA3, 16, jnp.array([[at]], jnp.int32)))
            for x, at in ((q, p), (k, s))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(9, 3)) > 1e-2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (dict(rope_type="dynamic", factor=2.0), "rope_type='dynamic'"),
        (dict(type="longrope", short_factor=[1.0]), "rope_type='longrope'"),
        (dict(rope_type="linear"), "factor"),
        (dict(rope_type="linear", factor=0.0), "factor=0.0"),
        (dict(rope_type="yarn", factor=4.0), "original_max_position_embeddings"),
        (dict(rope_theta=-1.0), "rope_theta=-1.0"),
        (dict(rope_type="default", mrope_section=[1, 1]), "mrope_section"),
        (dict(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (
            dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            "high_freq_factor=4.0",
        ),
    ],
)
def test_refusals_name_the_entry(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rope(entry)


def test_reading_leaves_out_what_the_type_does_not_read() -> None:
    entry = dict(type="linear", rope_theta=10000, factor=2, beta_fast=None, low_freq_factor=1.0)
    rope = read_rope(entry)
    assert rope == RopeConfig(rope_type="linear", rope_theta=10000.0, factor=2.0)
    assert rope.to_hf() == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    for other in (LLAMA3, RopeConfig(**YARN, attention_factor=1.0, truncate=False, mscale=0.5)):
        assert read_rope(other.to_hf()) == other
