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
from jaxrl.rollout import stages
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.requests import lay_out_prompts
from jaxrl.rollout.sampler import Request, Response, prefill, sample_batch
from jaxrl.rollout.stages import Stages

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


def drawn(name: str, limits: list[int], most: int = 30) -> tuple[Response, int]:
    samples, rows = 2, len(limits)
    request = Request(
        keys=request_keys(0, range(rows), [0] * rows),
        limits=jnp.asarray(limits, jnp.int32),
        stop_ids=jnp.asarray([7], jnp.int32),
        knobs=Knobs(temperature=jnp.float32(1.0)),
    )
    prompts = lay_out_prompts(PROMPTS, len(PROMPTS), 20, pad=0, pack=True)
    run, params = Stages(MODELS[name], gather=True), PARAMS[name]
    weights, sizes = run.weights(params), {"samples": samples, "max_new_tokens": most}
    response, count = run.sample(params, weights, prompts, request, **sizes)
    whole = jax.jit(partial(sample_batch, MODELS[name], **sizes))(params, prompts, request)
    # Stage by stage a row ends where and as it would in a single batch with room for everything.
    np.testing.assert_array_equal(response.lengths, whole.lengths)
    np.testing.assert_array_equal(response.stopped, whole.stopped)
    for row, length in enumerate(np.asarray(whole.lengths)):
        np.testing.assert_array_equal(response.ids[row, :length], whole.ids[row, :length])
        logprobs = response.logprobs[row, :length], whole.logprobs[row, :length]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    assert response.steps == whole.steps == max(whole.lengths)
    return response, count


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_shrinks_draws_what_it_would_have_drawn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen rows, then the last four, then the last."""
    monkeypatch.setattr(stages, "WORTH", 1)
    response, count = drawn(name, [3, 1, 12, 0, 30, 2, 2, 5, 99, 1, 4, 8, 22, 3, 6, 2])
    assert response.stopped.any() and not response.stopped.all()
    *_, fifth, _, _, second, last = sorted(response.lengths.tolist())
    assert fifth <= second <= last and fifth < last
    assert count == 16 * fifth + 4 * (second - fifth) + (last - second)


def test_room_grows_as_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 2, 8 and 20 tokens, in a batch too small to shrink."""
    monkeypatch.setattr(stages, "FIRST_ROOM", 2)
    monkeypatch.setattr(stages, "SMALLEST", 17)
    response, count = drawn("window", [2, 8, 20, 9, 1, 0, 7, 3, 5, 12, 2, 2, 19, 6, 6, 4], most=20)
    assert count == 16 * int(max(response.lengths)) and max(response.lengths) > 8


def test_a_batch_grows_and_shrinks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "FIRST_ROOM", 3)
    monkeypatch.setattr(stages, "WORTH", 13)
    response, count = drawn("qwen3", [3] * 13 + [16] * 3, most=16)
    assert max(response.lengths) > 3 and count < 16 * int(max(response.lengths))


def test_a_batch_with_few_steps_left_stays_as_it_is() -> None:
    """Thirty more steps at most: less than a program of another size is worth."""
    response, count = drawn("qwen3", [30, 20, *[1] * 14])
    assert count == 16 * int(max(response.lengths)) > 16
