"""`Model`: segments, padding, cache, rematerialisation, dtypes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.models import Model, ModelConfig

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    initializer_range=0.25,
)
LLAMA = ModelConfig("llama", **SIZES, tie_word_embeddings=True)
QWEN = ModelConfig("qwen3", **SIZES)
WINDOW = ModelConfig("qwen3", **SIZES, windows=(0, 3, 3))
CONFIGS = {"llama": LLAMA, "qwen3-window": WINDOW}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
rng = np.random.default_rng(0)

# One compilation a model and shape: run op by op, each call would compile its layer scan again.
hidden_states = jax.jit(Model.hidden, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def extend(model: Model, params: Any, *given: Any) -> Any:
    return model.extend(model.for_sampling(params, gather=False), *given)


@functools.cache
def params_of(config: ModelConfig) -> Any:
    return Model(config).init(jax.random.key(0))


def start(config: ModelConfig, **settings: Any) -> tuple[Model, Any]:
    return Model(config, **settings), params_of(config)


def ints(*rows: Any) -> jax.Array:
    return jnp.asarray(np.array(rows), jnp.int32)


def alone(model: Model, params: Any, tokens: np.ndarray) -> jax.Array:
    ids = ints(tokens)
    return hidden_states(model, params, ids, ints(np.arange(len(tokens))), jnp.ones_like(ids))[0]


@each_config
def test_packed_segments_do_not_see_each_other(config: ModelConfig) -> None:
    """PK-01: A's tokens move nothing in B, to the bit, and B is what it is alone."""
    model, params = start(config)
    first, other, second = (rng.integers(0, 64, n) for n in (5, 5, 4))
    positions = ints([*range(5), *range(4), 0])
    segments = ints([1] * 5 + [2] * 4 + [0])
    packed = [
        hidden_states(model, params, ints([*a, *second, 0]), positions, segments)[0]
        for a in (first, other)
    ]
    assert abs(packed[0][:5] - packed[1][:5]).max() > 0.1
    assert (packed[0][5:9] == packed[1][5:9]).all()
    np.testing.assert_allclose(packed[0][:5], alone(model, params, first), atol=1e-5)
    np.testing.assert_allclose(packed[0][5:9], alone(model, params, second), atol=1e-5)


def test_packed_gradients_do_not_mix() -> None:
    """The gradient of a packed row is that of its segments in rows of their own."""
    model, params = start(WINDOW)
    a, b = rng.integers(0, 64, 5), rng.integers(0, 64, 4)
    packed = ints([*a, *b]), ints([*range(5), *range(4)]), ints([1] * 5 + [2] * 4)
    apart = ints(a, [*b, 0]), ints(range(5), range(5)), ints([1] * 5, [1] * 4 + [0])

    @jax.jit
    @functools.partial(jax.grad, argnums=0)
    def gradient(params: Any, *batch: jax.Array) -> jax.Array:
        states = jnp.sin(model.hidden(params, *batch))
        return jnp.where(batch[2][..., None] > 0, states, 0.0).sum()

    got, expected = gradient(params, *packed), gradient(params, *apart)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5 * float(abs(two).max() + 1))


@each_config
def test_responses_that_share_a_prompt_do_not_see_each_other(config: ModelConfig) -> None:
    """One prompt (branch 0) and two responses in a segment: each is what it is alone."""
    model, params = start(config)
    prompt, first, other, second = (rng.integers(0, 64, n) for n in (4, 2, 2, 3))
    positions = ints([*range(4), *range(4, 6), *range(4, 7)])
    branches = ints([0] * 4 + [1] * 2 + [2] * 3)
    packed = [
        hidden_states(
            model,
            params,
            ints([*prompt, *response, *second]),
            positions,
            jnp.ones_like(positions),
            branches,
        )[0]
        for response in (first, other)
    ]
    assert (packed[0][:4] == packed[1][:4]).all() and (packed[0][6:] == packed[1][6:]).all()
    assert abs(packed[0][4:6] - packed[1][4:6]).max() > 0.1
    with_first = alone(model, params, np.concatenate([prompt, first]))
    with_second = alone(model, params, np.concatenate([prompt, second]))
    np.testing.assert_allclose(packed[0][:6], with_first, atol=1e-5)
    np.testing.assert_allclose(packed[0][6:], with_second[4:], atol=1e-5)


@each_config
def test_padding_on_either_side_changes_nothing(config: ModelConfig) -> None:
    """LP-09, TK-03: positions count real tokens; what stands in the padding does not matter."""
    model, params = start(config)
    tokens = rng.integers(0, 64, 4)
    expected = alone(model, params, tokens)
    for pad_id in (0, int(tokens[1])):
        pads = [pad_id] * 3
        left = hidden_states(
            model,
            params,
            ints([*pads, *tokens]),
            ints([0, 0, 0, *range(4)]),
            ints([0] * 3 + [1] * 4),
        )[0]
        right = hidden_states(
            model,
            params,
            ints([*tokens, *pads]),
            ints([*range(4), 7, -1, 9]),
            ints([1] * 4 + [0] * 3),
        )[0]
        np.testing.assert_allclose(left[3:], expected, atol=1e-5)
        np.testing.assert_allclose(right[:4], expected, atol=1e-5)
        assert jnp.isfinite(left).all() and jnp.isfinite(right).all()


@each_config
def test_the_future_is_not_seen(config: ModelConfig) -> None:
    model, params = start(config)
    tokens = rng.integers(0, 64, 8)
    changed = tokens.copy()
    changed[5] = (changed[5] + 1) % 64
    before, after = alone(model, params, tokens), alone(model, params, changed)
    assert (before[:5] == after[:5]).all()
    assert (abs(before[5:] - after[5:]).max(axis=-1) > 1e-3).all()


def test_window_counts_the_query_itself() -> None:
    """Window 3, one layer: position p sees p - 2, p - 1 and p."""
    sizes = {**SIZES, "num_hidden_layers": 1}
    model, params = start(ModelConfig("mistral", **sizes, windows=(3,)))
    tokens = rng.integers(0, 64, 8)
    changed = tokens.copy()
    changed[2] = (changed[2] + 1) % 64
    moved = abs(alone(model, params, tokens) - alone(model, params, changed)).max(axis=-1)
    assert [bool(m > 0) for m in moved] == [False, False, True, True, True, False, False, False]


def decode(
    model: Model, params: Any, rows: list[np.ndarray], prompt: int, width: int
) -> list[np.ndarray]:
    """Prefill left-padded prompts of unequal length, then one token at a time."""
    lengths = [prompt - i for i in range(len(rows))]
    padded, positions = [], []
    for row, length in zip(rows, lengths, strict=True):
        pad = prompt - length
        padded.append([1] * pad + list(row[:length]))
        positions.append([-1] * pad + list(range(length)))
    cache = model.init_cache(len(rows), width)
    hidden, cache = extend(model, params, ints(*padded), ints(*positions), cache)
    out = [[h for h in state[prompt - n :]] for state, n in zip(hidden, lengths, strict=True)]
    for step in range(len(rows[0]) - prompt):
        token = ints(*([row[n + step]] for row, n in zip(rows, lengths, strict=True)))
        hidden, cache = extend(model, params, token, ints(*([n + step] for n in lengths)), cache)
        for states, state in zip(out, hidden, strict=True):
            states.append(state[0])
    assert int(cache.index) == len(rows[0])
    return [np.stack(states) for states in out]


@each_config
def test_extend_equals_hidden(config: ModelConfig) -> None:
    """Prefill with left padding and unequal lengths, then decoding, in a cache too long."""
    model, params = start(config)
    rows = [rng.integers(0, 64, 11) for _ in range(3)]
    for row, states in zip(rows, decode(model, params, rows, prompt=6, width=13), strict=True):
        expected = alone(model, params, row)[: len(states)]
        np.testing.assert_allclose(states, expected, atol=1e-5)


def test_extend_by_several_tokens_at_once() -> None:
    model, params = start(WINDOW)
    tokens = ints(rng.integers(0, 64, 9), rng.integers(0, 64, 9))
    positions = ints(np.arange(9), np.arange(9))
    whole = hidden_states(model, params, tokens, positions, jnp.ones_like(tokens))
    cache = model.init_cache(2, 9)
    parts = []
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        part = slice(begin, end)
        hidden, cache = extend(model, params, tokens[:, part], positions[:, part], cache)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


def test_cache_columns_and_empty_positions() -> None:
    model, params = start(QWEN)
    cache = model.init_cache(2, 5)
    assert [array.shape for array in cache.k + cache.v] == [(2, 2, 5, 12)] * 6
    assert (cache.positions == -1).all() and cache.index == 0
    hidden, cache = extend(model, params, ints([9, 7], [1, 7]), ints([0, 1], [-1, 0]), cache)
    assert cache.positions.tolist() == [[0, 1, -1, -1, -1], [-1, 0, -1, -1, -1]]
    assert cache.index == 2 and jnp.isfinite(hidden).all()
    assert all(k[:, :, :2].any() and not k[:, :, 2:].any() for k in cache.k)
    # What an empty or padded column holds is never seen.
    dirty = type(cache)(
        k=[k.at[1, :, 0].set(50.0).at[:, :, 4].set(50.0) for k in cache.k],
        v=[v.at[1, :, 0].set(50.0).at[:, :, 4].set(50.0) for v in cache.v],
        positions=cache.positions,
        index=cache.index,
    )
    step = ints([3], [4]), ints([2], [1])
    clean, _ = extend(model, params, *step, cache)
    assert (clean == extend(model, params, *step, dirty)[0]).all()


def test_decoding_updates_the_cache_in_place() -> None:
    """A donated cache is aliased; no step copies the cache or the weights of all layers."""
    sizes = {**SIZES, "num_hidden_layers": 16}
    model = Model(ModelConfig("llama", **sizes, tie_word_embeddings=True))
    params = jax.eval_shape(
        lambda key: model.for_sampling(model.init(key), gather=True), jax.random.key(0)
    )
    cache = jax.eval_shape(lambda: model.init_cache(4, 64))
    step = jax.jit(model.extend, donate_argnums=3)
    compiled = step.lower(params, *[jnp.zeros((4, 1), jnp.int32)] * 2, cache).compile()
    memory = compiled.memory_analysis()
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    layers = sum(4 * leaf.size for leaf in jax.tree.leaves(params["layers"]))
    assert memory.temp_size_in_bytes < min(size, layers) / 4


def a_batch() -> tuple[jax.Array, ...]:
    fixed = np.random.default_rng(1)
    tokens = ints(*fixed.integers(0, 64, (3, 12)))
    positions = ints([*range(7), *range(5)], list(range(12)), [*range(9), 0, 0, 0])
    segments = ints([1] * 7 + [2] * 5, [1] * 12, [1] * 9 + [0] * 3)
    return tokens, positions, segments


@functools.cache
def trained(config: ModelConfig, remat: str) -> tuple[jax.Array, Any, int]:
    """States and gradients of one training forward, and its temporary bytes."""
    model, params = start(config, remat=remat)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden = model.hidden(params, *a_batch())
        return jnp.sin(hidden).sum(), hidden

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()
    (_, hidden), grads = compiled(params)
    return hidden, grads, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("remat", ["full", "dots"])
@each_config
def test_scoring_and_training_forward_are_bit_identical(config: ModelConfig, remat: str) -> None:
    """The anchors' forward and the one under value_and_grad: the first ratio is exactly 1."""
    model, params = start(config, remat=remat)
    assert (hidden_states(model, params, *a_batch()) == trained(config, remat)[0]).all()


def test_remat_changes_memory_only() -> None:
    results = [trained(WINDOW, remat) for remat in ("full", "dots", "none")]
    for other in results[1:]:
        pairs = zip(jax.tree.leaves(results[0][:2]), jax.tree.leaves(other[:2]), strict=True)
        for one, two in pairs:
            np.testing.assert_allclose(one, two, atol=1e-5 * float(abs(one).max() + 1))
    full, dots, none = (memory for _, _, memory in results)
    assert full < dots < none


def test_attention_that_was_kept_is_not_computed_again() -> None:
    """Same numbers; of its seven products, the two of the forward pass are made once."""

    def gradient(remat: str) -> tuple[Any, float]:
        model, params = start(QWEN, remat=remat, attention="blockwise")
        batch = a_batch()
        program = jax.jit(jax.grad(lambda p: jnp.sin(model.hidden(p, *batch)).sum()))
        compiled = program.lower(params).compile()
        return compiled(params), str(program.trace(params).jaxpr).count(" exp ")

    (kept, few), (again, many) = gradient("attention"), gradient("full")
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert few < many


@each_config
def test_bfloat16_is_close(config: ModelConfig) -> None:
    """bfloat16 keeps eight bits; states after the norm are of order one."""
    batch = a_batch()
    exact_model, params = start(config)
    model = Model(config, dtype="bfloat16")
    rough = hidden_states(model, params, *batch)
    assert rough.dtype == jnp.bfloat16
    assert model.init_cache(1, 2).k[0].dtype == jnp.bfloat16
    exact = hidden_states(exact_model, params, *batch)
    # A sampler may cast its copy of the parameters once, instead of at every step.
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert (hidden_states(model, cast, *batch) == rough).all()
    real = batch[2] > 0
    error = abs(rough.astype(jnp.float32) - exact).mean(axis=-1)[real]
    assert 0 < error.mean() < 0.03
    grads = jax.eval_shape(
        jax.grad(lambda params: hidden_states(model, params, *batch).sum()), params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_init_is_that_of_hugging_face() -> None:
    config = ModelConfig("qwen2", **{**SIZES, "initializer_range": 0.02, "vocab_size": 512})
    params = Model(config).init(jax.random.key(1))
    again = Model(config).init(jax.random.key(1))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, again))
    assert (params["norm"]["scale"] == 1).all()
    assert not params["layers"]["attention"]["q"]["bias"].any()
    for weight in (params["embed"]["weight"], params["head"]["kernel"]):
        assert abs(float(weight.std()) - 0.02) < 1e-3 and abs(float(weight.mean())) < 1e-3
    gate = params["layers"]["mlp"]["gate"]["kernel"]
    assert (gate[0] != gate[1]).any() and (gate != params["layers"]["mlp"]["up"]["kernel"]).any()
    assert type(params) is dict and type(params["layers"]["attention"]) is dict


def test_head_and_trunk_without_head() -> None:
    model, params = start(LLAMA)
    assert "head" not in params
    assert (model.head(params) == params["embed"]["weight"].T).all()
    model, params = start(QWEN)
    assert model.head(params) is params["head"]["kernel"]
    trunk = {name: node for name, node in params.items() if name != "head"}
    batch = a_batch()
    with_head = hidden_states(model, params, *batch)
    assert (hidden_states(model, trunk, *batch) == with_head).all()


def test_settings_are_checked_and_static() -> None:
    assert hash(Model(QWEN)) == hash(Model(QWEN)) and Model(QWEN) == Model(QWEN)
    with pytest.raises(ConfigError, match="dtype='float16'"):
        Model(QWEN, dtype="float16")
    with pytest.raises(ConfigError, match="remat='all'"):
        Model(QWEN, remat="all")
