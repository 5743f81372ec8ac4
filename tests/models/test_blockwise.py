"""Attention block by block: the dense definition's numbers and gradients, without its square."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import ConfigError
from jaxrl.models import Model, ModelConfig
from jaxrl.models.attention import attention, chosen_method
from jaxrl.models.blockwise import blockwise_attention
from jaxrl.models.sight import Sight
from jaxrl.models.splash import splash_attention


def packed_row(rng: np.random.Generator, length: int, segments: int) -> tuple[Any, Any, Any]:
    """Segments with branches, then padding: ids, branches, positions."""
    cuts = np.sort(rng.choice(np.arange(1, length), segments, replace=False))
    ids, branches = np.zeros(length, np.int32), np.zeros(length, np.int32)
    positions = np.zeros(length, np.int32)
    for number, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True), start=1):
        ids[start:end] = number
        branches[start:end] = np.arange(end - start) * 3 // (end - start)
        positions[start:end] = np.arange(end - start)
    return ids, branches, positions


def case(seed: int, length: int, *, windowed: bool = False) -> tuple[Sight, list[jax.Array]]:
    rng = np.random.default_rng(seed)
    rows = [packed_row(rng, length, n) for n in (1, 3)]
    ids, branches, positions = (jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True))
    placed = positions if windowed else None
    sight = Sight(ids, ids, branches, branches, placed, placed)
    shapes = ((2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 8), (2, length, 4, 8))
    return sight, [jnp.asarray(2 * rng.standard_normal(s), jnp.float32) for s in shapes]


def dense(sight: Sight, window: int, q: Any, k: Any, v: Any) -> jax.Array:
    size = sight.q_segments.shape[1]
    return attention(q, k, v, sight.visible(0, size, 0, sight.k_segments.shape[1], window))


@settings(max_examples=10)
@given(
    st.integers(0, 10**6),
    st.sampled_from([8, 13, 24]),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
)
def test_numbers_and_gradients_are_the_dense_ones(
    seed: int, length: int, window: int, by_row: bool
) -> None:
    sight, (q, k, v, pull) = case(seed, length, windowed=window > 0)

    def slow(*qkv: Any) -> jax.Array:
        return (dense(sight, window, *qkv) * pull).sum()

    def fast(*qkv: Any) -> jax.Array:
        return (blockwise_attention(*qkv, sight, window, block=8, by_row=by_row) * pull).sum()

    out = blockwise_attention(q, k, v, sight, window, block=8, by_row=by_row)
    np.testing.assert_allclose(out, dense(sight, window, q, k, v), atol=1e-5)
    for got, want in zip(
        jax.grad(fast, (0, 1, 2))(q, k, v), jax.grad(slow, (0, 1, 2))(q, k, v), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_blocks_out_of_sight_are_never_touched() -> None:
    """NaN in another segment's block of keys, and after the diagonal, reaches no one."""
    ids = jnp.asarray(np.repeat([[1, 2, 3]], 8, axis=1).reshape(1, 24))
    sight = Sight(ids, ids)
    first, last = sight.key_blocks(8, 8)
    assert (first.tolist(), last.tolist()) == ([0, 1, 2], [1, 2, 3])
    one = jnp.ones((1, 24, 1, 4))
    # The i-th of 8 equal keys weighs 1 / n in every query n >= i of its block.
    column_sums = [4 * sum(1 / n for n in range(i, 9)) for i in range(1, 9)]
    k = one.at[:, 16:].set(jnp.nan).at[:, :8].set(jnp.nan)
    out, grads = jax.value_and_grad(
        lambda q, v: blockwise_attention(q, k, v, sight, block=8)[:, 8:16].sum(), (0, 1)
    )(one, one)
    assert out == 32.0
    assert jnp.isfinite(grads[0][:, 8:16]).all()
    np.testing.assert_allclose(grads[1][:, 8:16].sum(axis=(0, 2, 3)), column_sums, rtol=1e-6)


def test_a_cache_is_read_from_the_column_of_its_first_query() -> None:
    rng = np.random.default_rng(5)
    q = jnp.asarray(rng.standard_normal((2, 9, 2, 4)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 30, 2, 4)), jnp.float32) for _ in range(2))
    there = (jnp.arange(30) < 20)[None] & (jnp.arange(30)[None] >= jnp.array([[0], [4]]))
    sight = Sight(jnp.ones((2, 9), jnp.int32), there.astype(jnp.int32), first=jnp.int32(11))
    mask = there[:, None] & (jnp.arange(30)[None, None] <= 11 + jnp.arange(9)[None, :, None])
    for by_row in (False, True):
        way = partial(blockwise_attention, block=4, by_row=by_row)
        np.testing.assert_allclose(
            jax.jit(way)(q, k, v, sight), attention(q, k, v, mask), atol=1e-5
        )


def test_bfloat16_products_keep_float32_sums() -> None:
    """A thousand equal weights: the mean of the values, to the rounding of one bfloat16."""
    ids = jnp.ones((1, 1024), jnp.int32)
    q = jnp.zeros((1, 1024, 1, 4), jnp.bfloat16)
    v = jnp.asarray(np.random.default_rng(0).random((1, 1024, 1, 4)), jnp.bfloat16)
    out = blockwise_attention(q, q, v, Sight(ids, ids), block=128)
    assert out.dtype == jnp.bfloat16
    means = np.cumsum(np.asarray(v, np.float64), axis=1) / np.arange(1, 1025)[None, :, None, None]
    np.testing.assert_allclose(np.asarray(out, np.float64), means, rtol=2**-8)


def temporaries(length: int, method: str) -> int:
    """Bytes that a gradient of one layer needs beside its arguments."""
    config = ModelConfig(
        "qwen3",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Model(config, attention=method)
    params = jax.eval_shape(model.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    step = jax.grad(lambda p, x: model.hidden(p, x, x, x, x).sum())
    return jax.jit(step).lower(params, ids).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_not_its_square() -> None:
    short, long = temporaries(2048, "auto"), temporaries(8192, "auto")
    assert long < 4.5 * short
    assert temporaries(2048, "dense") > 4 * short


def seen(queries: int, keys: int, **more: Any) -> Sight:
    return Sight(jnp.ones((1, queries), jnp.int32), jnp.ones((1, keys), jnp.int32), **more)


TPU: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
BRANCHES = {"q_branches": jnp.zeros((1, 512)), "k_branches": jnp.zeros((1, 512))}


@pytest.mark.parametrize(
    ("method", "mesh", "sight", "chosen"),
    [
        ("auto", None, seen(256, 256), "dense"),
        ("auto", None, seen(257, 257), "blockwise"),
        ("auto", None, seen(1, 8192), "dense"),
        ("blockwise", None, seen(8, 8), "blockwise"),
        ("dense", None, seen(4096, 4096), "dense"),
        ("auto", TPU, seen(512, 512), "splash"),
        ("auto", TPU, seen(512, 512, **BRANCHES), "blockwise"),
        ("auto", TPU, seen(520, 520), "blockwise"),
        ("splash", TPU, seen(512, 512), "splash"),
        ("splash", TPU, seen(512, 1024), "blockwise"),
    ],
)
def test_auto_takes_blocks_where_the_square_would_be_large(
    method: str, mesh: Any, sight: Sight, chosen: str
) -> None:
    assert chosen_method(method, mesh, sight, 128) == chosen


def test_splash_says_why_it_cannot() -> None:
    with pytest.raises(ConfigError, match=r"packing.share_prompts=true; take auto"):
        chosen_method("splash", TPU, seen(512, 512, **BRANCHES), 128)
    with pytest.raises(ConfigError, match="heads of 64 features"):
        chosen_method("splash", TPU, seen(512, 512), 64)


def test_the_tpu_kernel_gives_the_dense_numbers_and_gradients() -> None:
    """Interpreted on CPU: two heads a key head, three segments and padding."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.stack([packed_row(rng, 256, 3)[0], packed_row(rng, 256, 1)[0]]))
    sight = Sight(ids, ids)
    shapes = ((2, 256, 2, 128), (2, 256, 1, 128), (2, 256, 1, 128), (2, 256, 2, 128))
    q, k, v, pull = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)

    def of(way: Any) -> Any:
        return jax.value_and_grad(lambda *qkv: (way(*qkv) * pull).sum(), (0, 1, 2))(q, k, v)

    fast = of(lambda *qkv: splash_attention(*qkv, sight, interpret=True))
    slow = of(lambda *qkv: dense(sight, 0, *qkv))
    for got, want in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
