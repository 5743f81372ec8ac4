"""Prompts packed into rows, and rows that go on in a smaller batch: the same completions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import Model, ModelConfig
from jaxrl.models.sampling import Knobs
from jaxrl.rollout import sampler
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.requests import lay_out_prompts
from jaxrl.rollout.sampler import Request, Response, prefill, sample_batch

SIZES: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.4,
)
MODELS = {
    "qwen3": Model(ModelConfig("qwen3", **SIZES)),
    "window": Model(ModelConfig("qwen3", **SIZES, windows=(0, 3))),
}
PARAMS = {name: model.init(jax.random.key(0)) for name, model in MODELS.items()}
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 40, n).tolist() for n in (3, 17, 1, 9, 12, 5, 2, 4)]


def test_prompts_lie_one_behind_the_other() -> None:
    prompts = lay_out_prompts([[1, 2], [3, 4, 5, 6], [7]], 5, 4, pad=9, pack=True)
    assert prompts.tokens.tolist() == [[3, 4, 5, 6], [1, 2, 7, 9]]
    assert prompts.segments.tolist() == [[2, 2, 2, 2], [1, 1, 3, 0]]
    # The fourth and fifth are the first again, and are not computed again.
    assert prompts.lasts.tolist() == [5, 3, 6, 5, 5]
    assert prompts.lengths.tolist() == [2, 4, 1, 2, 2]


@pytest.mark.parametrize("pack", [False, True])
def test_alone_in_a_row_a_prompt_is_on_its_right(pack: bool) -> None:
    """Where nobody may share a row, and where sharing saves none."""
    ids = [[1, 2], [3]] if not pack else [[1, 2, 8], [3, 4, 5]]
    prompts = lay_out_prompts(ids, 3 - pack, 4, pad=9, pack=pack)
    rows = [[9, 9, 1, 2], [9, 9, 9, 3], [9, 9, 1, 2]] if not pack else [[9, 1, 2, 8], [9, 3, 4, 5]]
    assert prompts.tokens.tolist() == rows
    seen = [[0 if token == 9 else i for token in row] for i, row in enumerate(rows, start=1)]
    assert prompts.segments.tolist() == seen
    assert prompts.lasts.tolist() == [4 * i + 3 for i in range(len(rows))]


def test_rows_are_of_few_numbers() -> None:
    found = {
        lay_out_prompts([[1]] * n, 64, 1, pad=0, pack=True).tokens.shape[0] for n in range(1, 65)
    }
    assert found == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}


@pytest.mark.parametrize("name", MODELS)
def test_packed_prompts_are_read_as_each_alone(name: str) -> None:
    """Hidden states of their last tokens, and what the cache gets of every token."""
    model, params = MODELS[name], PARAMS[name]
    packed = lay_out_prompts(PROMPTS, 9, 20, pad=0, pack=True)
    assert packed.tokens.shape == (3, 20)
    read = jax.jit(partial(prefill, model))
    got = read(params, packed)
    for i, ids in enumerate([*PROMPTS, PROMPTS[0]]):
        alone = read(params, lay_out_prompts([ids], 1, len(ids), pad=0, pack=False))
        np.testing.assert_allclose(got.hidden[i], alone.hidden[0], atol=1e-5)
        for of_all, own in ((got.k, alone.k), (got.v, alone.v)):
            np.testing.assert_allclose(of_all[:, i, :, 20 - len(ids) :], own[:, 0], atol=1e-5)
    assert got.lengths.tolist() == [*map(len, PROMPTS), 3]


def drawn(name: str, limits: list[int]) -> Response:
    samples, rows = 2, len(limits)
    request = Request(
        keys=request_keys(0, range(rows), [0] * rows),
        limits=jnp.asarray(limits, jnp.int32),
        stop_ids=jnp.asarray([7], jnp.int32),
        knobs=Knobs(temperature=jnp.float32(1.0)),
    )
    prompts = lay_out_prompts(PROMPTS, len(PROMPTS), 20, pad=0, pack=True)
    sample = jax.jit(partial(sample_batch, MODELS[name], samples=samples, max_new_tokens=30))
    return sample(PARAMS[name], prompts, request)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_shrinks_draws_what_it_would_have_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen rows, then the last four: every row ends where and as it would without."""
    limits = [3, 1, 12, 0, 30, 2, 2, 5, 99, 1, 4, 8, 22, 3, 6, 2]
    shrunk = drawn(name, limits)
    monkeypatch.setattr(sampler, "FEWEST", 17)
    whole = drawn(name, limits)
    np.testing.assert_array_equal(shrunk.lengths, whole.lengths)
    np.testing.assert_array_equal(shrunk.stopped, whole.stopped)
    assert whole.stopped.any() and not whole.stopped.all()
    lengths = np.asarray(whole.lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(shrunk.ids[row, :length], whole.ids[row, :length])
        logprobs = shrunk.logprobs[row, :length], whole.logprobs[row, :length]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    steps, at = int(lengths.max()), int(np.sort(lengths)[-5])
    assert shrunk.steps == whole.steps == steps > at
    assert whole.drawn == 16 * steps and shrunk.drawn == 16 * at + 4 * (steps - at)
