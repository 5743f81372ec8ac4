"""The trainside engine: order, honest log-probabilities, seeds, stops, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import RolloutError
from jaxrl.models import Model, ModelConfig
from jaxrl.models.sampling import Knobs
from jaxrl.rollout import TrainsideEngine
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.requests import lay_out_prompts
from jaxrl.rollout.sampler import Request, sample_batch
from jaxrl.types import Prompt, Sampling, Trajectory

VOCAB = 40
TINY = Model(
    ModelConfig(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        initializer_range=0.4,
    )
)
PARAMS = TINY.init(jax.random.key(0))
rng = np.random.default_rng(0)
PROMPTS = [
    Prompt(row=10 + i, ids=tuple(rng.integers(0, VOCAB, n).tolist()), text="", columns={})
    for i, n in enumerate((3, 17, 1, 9, 12))
]


def engine_of(batch_size: int = 64, **settings: Any) -> TrainsideEngine:
    return TrainsideEngine(TINY, PARAMS, batch_size=batch_size, **settings)


@pytest.fixture(scope="module")
def shared() -> TrainsideEngine:
    return engine_of()


@pytest.fixture
def engine(shared: TrainsideEngine) -> TrainsideEngine:
    """One engine for all, since compiling is what takes time; each test starts from PARAMS."""
    shared.publish(PARAMS, 0)
    return shared


def sampling_of(max_new_tokens: int = 16, **settings: Any) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens, **settings)


def responses(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    return [trajectory.response_ids for trajectory in trajectories]


@jax.jit
def logits_of(params: Any, ids: jax.Array) -> jax.Array:
    places = jnp.arange(ids.shape[0])[None]
    hidden = TINY.hidden(params, ids[None], places, jnp.ones_like(places))
    return hidden[0] @ TINY.head(params)


def dense_logits(ids: Sequence[int], params: Any = PARAMS) -> np.ndarray:
    """Next-token logits after each id, from one uncached forward."""
    # Padded on the right, where causality keeps it out, to compile once.
    padded = np.zeros(40, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(logits_of(params, jnp.asarray(padded)))[: len(ids)]


def dense_logprobs(
    trajectory: Trajectory, temperature: float = 1.0, params: Any = PARAMS
) -> np.ndarray:
    """The response's log-probabilities from one uncached forward over prompt and response."""
    z = dense_logits(trajectory.ids, params).astype(np.float64) / temperature
    dense = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    first = len(trajectory.prompt.ids)
    rows = np.arange(first - 1, len(trajectory.ids) - 1)
    return dense[rows, trajectory.response_ids]


def test_order_is_prompt_major_and_everything_is_labelled(engine: TrainsideEngine) -> None:
    got = engine.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=1)
    assert [(t.prompt.row, t.sample) for t in got] == [
        (10 + i, j) for i in range(5) for j in range(4)
    ]
    for trajectory in got:
        assert trajectory.prompt in PROMPTS
        assert len(trajectory.response_ids) == len(trajectory.logprobs) == 16
        assert all(type(token) is int and 0 <= token < VOCAB for token in trajectory.response_ids)
        assert trajectory.finish_reason == "length"
        assert trajectory.truncated
        assert trajectory.weight_version == 0
    assert engine.generate([], samples=4, sampling=sampling_of(), seed=1) == []


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.7, 7)])
def test_logprobs_are_those_of_an_uncached_forward(
    engine: TrainsideEngine, temperature: float, top_k: int
) -> None:
    """At the sampling temperature, over the tokens that the filter left."""
    sampling = sampling_of(temperature=temperature, top_k=top_k)
    for trajectory in engine.generate(PROMPTS, samples=4, sampling=sampling, seed=2):
        first = len(trajectory.prompt.ids) - 1
        z = np.asarray(dense_logits(list(trajectory.ids)), np.float64)[first:-1] / temperature
        if top_k:
            z[z < np.sort(z, axis=-1)[:, -top_k, None]] = -np.inf
        z -= np.log(np.sum(np.exp(z), axis=-1, keepdims=True))
        expected = z[np.arange(len(z)), trajectory.response_ids]
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-5)


def test_greedy_is_the_argmax_with_logprobs_at_temperature_one(engine: TrainsideEngine) -> None:
    got = engine.generate(PROMPTS, samples=4, sampling=sampling_of(temperature=0.0), seed=3)
    for trajectory in got:
        np.testing.assert_allclose(trajectory.logprobs, dense_logprobs(trajectory), atol=1e-5)
        ids = list(trajectory.prompt.ids)
        for token in trajectory.response_ids:
            assert token == int(np.argmax(dense_logits(ids)[-1]))
            ids.append(token)
    assert responses(got[0::4]) == responses(got[1::4])


def test_sampled_tokens_follow_the_models_distribution(engine: TrainsideEngine) -> None:
    """First tokens of 4,000 samples of one prompt against the model's own probabilities."""
    sampling, prompt = sampling_of(1, temperature=1.5), PROMPTS[1]
    got = engine.generate([prompt], samples=4_000, sampling=sampling, seed=4)
    observed = np.bincount([t.response_ids[0] for t in got], minlength=VOCAB)
    expected = np.asarray(jax.nn.softmax(dense_logits(prompt.ids)[-1] / 1.5)) * 4_000
    # Chi-square with 39 degrees of freedom exceeds 86 about once in 50,000.
    assert np.sum((observed - expected) ** 2 / expected) < 86


def test_samples_differ_and_reruns_agree(engine: TrainsideEngine) -> None:
    """RP-02, RS-10: seeds depend on (seed, row, sample); a fresh engine repeats them."""
    sampling = sampling_of()
    got = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=5)
    for i in range(len(PROMPTS)):
        assert len(set(responses(got[4 * i : 4 * i + 4]))) == 4
    again = engine_of().generate(PROMPTS, samples=4, sampling=sampling, seed=5)
    assert again == got
    other = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=5 + 2**32)
    assert set(responses(other)).isdisjoint(responses(got))


def test_the_same_text_in_another_row_or_epoch_is_sampled_apart(engine: TrainsideEngine) -> None:
    twins = [
        Prompt(row=row, epoch=epoch, ids=(1, 2, 3), text="", columns={})
        for row, epoch in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    got = engine.generate(twins, samples=4, sampling=sampling_of(), seed=6)
    assert len(set(responses(got))) == 16


@pytest.mark.parametrize("batch_size", [1, 3])
def test_company_does_not_change_a_completion(engine: TrainsideEngine, batch_size: int) -> None:
    """Batch splits, dummy rows, order and other prompts of other lengths."""
    sampling = sampling_of(stop_token_ids=(4, 5))
    whole = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=7)
    split = engine_of(batch_size).generate(PROMPTS, samples=4, sampling=sampling, seed=7)
    assert responses(split) == responses(whole)
    for one, other in zip(split, whole, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    if batch_size == 1:
        backwards = engine.generate(PROMPTS[::-1], samples=4, sampling=sampling, seed=7)
        assert [responses(backwards)[4 * i : 4 * i + 4] for i in range(4, -1, -1)] == [
            responses(whole)[4 * i : 4 * i + 4] for i in range(5)
        ]
        alone = engine_of(1).generate(PROMPTS[2:3], samples=2, sampling=sampling, seed=7)
        assert responses(alone) == responses(whole)[8:10]


def test_a_stop_token_ends_the_response_and_belongs_to_it(engine: TrainsideEngine) -> None:
    free = engine.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=8)
    stops = (4, 11, 30)
    stopped = engine.generate(
        PROMPTS, samples=4, sampling=sampling_of(stop_token_ids=stops), seed=8
    )
    reasons = set()
    for before, after in zip(free, stopped, strict=True):
        places = [i for i, token in enumerate(before.response_ids) if token in stops]
        length = places[0] + 1 if places else 16
        assert after.response_ids == before.response_ids[:length]
        np.testing.assert_allclose(after.logprobs, before.logprobs[:length], atol=1e-5)
        assert after.finish_reason == ("stop" if places else "length")
        reasons.add(after.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_token_in_the_last_place_is_a_stop(engine: TrainsideEngine) -> None:
    free = engine.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=9)
    place, last = next(
        (i, t.response_ids[-1])
        for i, t in enumerate(free)
        if t.response_ids[-1] not in t.response_ids[:-1]
    )
    sampling = sampling_of(stop_token_ids=(last,))
    got = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=9)[place]
    assert got.response_ids == free[place].response_ids
    assert (free[place].finish_reason, got.finish_reason) == ("length", "stop")


def test_one_token_is_a_response(engine: TrainsideEngine) -> None:
    got = engine.generate(PROMPTS[1:2], samples=64, sampling=sampling_of(1), seed=10)
    stop = got[0].response_ids[0]
    sampling = sampling_of(1, stop_token_ids=(stop,))
    for trajectory in engine.generate(PROMPTS[1:2], samples=64, sampling=sampling, seed=10):
        assert len(trajectory.response_ids) == 1
        assert (trajectory.finish_reason == "stop") == (trajectory.response_ids[0] == stop)


def test_decoding_ends_when_all_live_rows_have_stopped(engine: TrainsideEngine) -> None:
    sampling = sampling_of(200, stop_token_ids=(0, 1, 2, 3))
    got = engine.generate(PROMPTS, samples=1, sampling=sampling, seed=11)
    lengths = [len(t.response_ids) for t in got]
    assert engine.stats.steps == max(lengths) < 200
    assert engine.stats.batches == 1
    assert engine.stats.response_tokens == sum(lengths)
    assert engine.stats.prompt_tokens == sum(len(p.ids) for p in PROMPTS)
    # Prompts of 42 tokens in two rows of 32 columns; eight rows, five of them live.
    assert engine.stats.computed_tokens == 2 * 32 + 8 * max(lengths)


def test_nobody_waits_for_dummy_rows() -> None:
    """Two rows, one of them live: decoding ends with the live one, which needs fewer tokens."""
    logits = dense_logits(PROMPTS[0].ids)[-1]
    stop = int(np.argmax(logits))
    ids = (PROMPTS[0].ids, PROMPTS[3].ids[:3])
    prompts = lay_out_prompts(ids, 2, 3, pad=0, pack=True)
    request = Request(
        keys=request_keys(0, [0, 1], [0, 0]),
        limits=jnp.asarray([16, 0], jnp.int32),
        stop_ids=jnp.asarray([stop], jnp.int32),
        knobs=Knobs(),
    )
    sample = jax.jit(partial(sample_batch, TINY, samples=1, max_new_tokens=16))
    response = sample(PARAMS, prompts, request)
    assert response.ids[0, 0] == stop and response.ids[1, 0] != stop
    assert response.steps == 1
    assert sample(PARAMS, prompts, request._replace(limits=jnp.full(2, 16, jnp.int32))).steps > 1


def test_a_limit_ends_a_row_and_nobody_waits_for_it(engine: TrainsideEngine) -> None:
    limits = [3, 1, 5, 2, 4]
    settings: dict[str, Any] = {"samples": 1, "sampling": sampling_of(9), "seed": 2}
    whole = engine.generate(PROMPTS, **settings)
    cut = engine.generate(PROMPTS, limits=limits, **settings)
    assert engine.stats.steps == 5
    for one, all_of_it, limit in zip(cut, whole, limits, strict=True):
        assert one.response_ids == all_of_it.response_ids[:limit]
        np.testing.assert_allclose(one.logprobs, all_of_it.logprobs[:limit], atol=1e-5)
        assert one.finish_reason == "length"


def test_padding_is_by_length_whatever_id_it_has(engine: TrainsideEngine) -> None:
    """TK-02, TK-03: the padding id is the stop token, and stands inside prompts and responses."""
    pad = PROMPTS[1].ids[0]
    sampling = sampling_of(stop_token_ids=(pad,))
    want = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=12)
    assert {t.finish_reason for t in want} == {"stop", "length"}
    got = engine_of(pad_token_id=pad).generate(PROMPTS, samples=4, sampling=sampling, seed=12)
    assert got == want


def test_published_weights_are_the_ones_that_sample(engine: TrainsideEngine) -> None:
    ask: dict[str, Any] = dict(samples=4, sampling=sampling_of(), seed=13)
    engine.publish(PARAMS, 3)
    old = engine.generate(PROMPTS, **ask)
    changed = TINY.init(jax.random.key(1))
    engine.publish(changed, 4)
    new = engine.generate(PROMPTS, **ask)
    assert {t.weight_version for t in old} == {3}
    assert {t.weight_version for t in new} == {4}
    assert responses(old) != responses(new)
    for trajectory in new:
        expected = dense_logprobs(trajectory, params=changed)
        np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-5)
    compiled = engine.compilations
    engine.publish(jax.tree.map(np.asarray, PARAMS), 5)
    assert responses(engine.generate(PROMPTS, **ask)) == responses(old)
    assert engine.compilations == compiled


def test_an_engine_without_weights_says_so() -> None:
    engine, closed = TrainsideEngine(TINY, batch_size=8), engine_of()
    closed.close()
    for empty in (engine, closed):
        with pytest.raises(RolloutError, match="no weights"):
            empty.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=0)


def test_weights_that_do_not_fit_are_listed_together() -> None:
    wrong = dict(PARAMS, value_head={"kernel": np.zeros((16, 1))})
    wrong["norm"] = {"scale": np.zeros(15)}
    del wrong["head"]
    with pytest.raises(RolloutError) as caught:
        engine_of().publish(wrong, 1)
    for fault in (
        "['head']['kernel'] is missing",
        "['value_head']['kernel'] is unknown",
        "['norm']['scale'] has shape (15,), expected (16,)",
    ):
        assert fault in str(caught.value)


def test_donated_weights_are_noticed() -> None:
    params = jax.tree.map(jnp.copy, PARAMS)
    engine = TrainsideEngine(TINY, params, batch_size=4)
    params["norm"]["scale"].delete()
    with pytest.raises(RolloutError, match="version 0 have been donated"):
        engine.generate(PROMPTS, samples=1, sampling=sampling_of(), seed=0)


def test_few_programs_are_compiled() -> None:
    engine = engine_of(8)
    for step in range(3):
        engine.generate(PROMPTS, samples=4, sampling=sampling_of(temperature=1 + step), seed=step)
    # Two prompts a batch, in one row or two of 16 columns or 32: three ways to read them; behind
    # 16 columns and 32 they are begun and drawn on.
    assert engine.compilations == 3 + 2 * 2
    engine.generate(PROMPTS[:2], samples=4, sampling=sampling_of(), seed=0)
    assert engine.compilations == 3 + 2 * 2
    engine.generate(PROMPTS[:2], samples=4, sampling=sampling_of(top_k=3), seed=0)
    assert engine.compilations == 3 + 3 * 2


def test_bfloat16_samples_and_reports_float32() -> None:
    model = Model(TINY.config, dtype="bfloat16")
    engine = TrainsideEngine(model, PARAMS, batch_size=16)
    got = engine.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=14)
    differences = [np.abs(np.subtract(t.logprobs, dense_logprobs(t))) for t in got]
    # bfloat16 keeps 8 bits: differences of percents, and not none.
    assert 1e-5 < np.mean(differences) < 0.05


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "prompt row 7 is empty"),
        ((1, VOCAB), f"prompt row 7 holds token id {VOCAB}, outside the model's vocabulary of 40"),
        ((1, -1, 2), "prompt row 7 holds token id -1"),
    ],
)
def test_impossible_prompts_are_refused(
    engine: TrainsideEngine, ids: tuple[int, ...], message: str
) -> None:
    prompts = [*PROMPTS, Prompt(row=7, ids=ids, text="", columns={})]
    with pytest.raises(RolloutError, match=message):
        engine.generate(prompts, samples=1, sampling=sampling_of(), seed=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"stop_token_ids": (VOCAB,)},
    ],
)
def test_impossible_settings_are_refused(engine: TrainsideEngine, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(RolloutError, match=name):
        engine.generate(PROMPTS, samples=1, sampling=sampling_of(**settings), seed=0)


def test_impossible_engines_and_counts_are_refused(engine: TrainsideEngine) -> None:
    with pytest.raises(RolloutError, match="batch_size=0"):
        engine_of(0)
    with pytest.raises(RolloutError, match="pad_token_id=40"):
        engine_of(pad_token_id=VOCAB)
    with pytest.raises(RolloutError, match="samples=0"):
        engine.generate(PROMPTS, samples=0, sampling=sampling_of(), seed=0)


def test_broken_weights_stop_the_rollout_with_the_row(engine: TrainsideEngine) -> None:
    broken = dict(PARAMS, norm={"scale": jnp.full(16, jnp.nan)})
    engine.publish(broken, 6)
    with pytest.raises(
        RolloutError, match="prompt row 12, sample 0: .* not finite at response token 0"
    ):
        engine.generate(PROMPTS, samples=4, sampling=sampling_of(), seed=0)
