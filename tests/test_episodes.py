"""Episodes: what a trajectory of several turns is made of, by hand and with the trainer's sampler.

SGLang servers play in tests/rollout/sglang/test_episodes_sglang.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import (
    ASK,
    BOS,
    EOS,
    SCRIPT,
    STOPS,
    Scripted,
    chat_prompt,
    encode,
    numbered,
    plain_prompt,
    play,
    runs,
    stage_of,
)

from jaxrl.environment import Environment
from jaxrl.episode import turns
from jaxrl.episodes import turn_seed
from jaxrl.errors import RolloutError
from jaxrl.logprobs import token_logprobs
from jaxrl.models import Model
from jaxrl.rollout import TrainsideEngine
from jaxrl.rollout.engine import LeftOut
from tests.rollout.sglang.models import CONFIG, make_params

MODEL, PARAMS = Model(CONFIG), jax.tree.map(jnp.asarray, make_params())


@pytest.fixture(scope="module")
def engine() -> TrainsideEngine:
    return TrainsideEngine(MODEL, PARAMS, batch_size=16)


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """`playing:counts`, or the one a test asks for."""
    with closing(Environment(f"playing:{getattr(request, 'param', 'counts')}", 5.0)) as made:
        yield made


# By hand


@pytest.mark.parametrize("concurrent", [False, True])
def test_an_episode_of_three_turns_by_hand(environment: Environment, concurrent: bool):
    """The template's end of a turn is the stop token the policy wrote: it is there once."""
    script = {
        (5, 0): [(30, 31, EOS), (32, EOS), (33, 34, 35, EOS)],
        (5, 1): [(40, EOS), (41, EOS), (42, EOS)],
    }
    engine = Scripted(script, concurrent=concurrent)
    prompt = chat_prompt(5)
    got, other = play(engine, [prompt], stage_of(environment), samples=2)
    between = encode("\n<bos>tool\nok<eos>\n<bos>assistant\n")
    gap = len(between)
    assert got.prompt == prompt and got.sample == 0
    assert got.response_ids == (30, 31, EOS, *between, 32, EOS, *between, 33, 34, 35, EOS)
    own = (True,) * 3 + (False,) * gap + (True,) * 2 + (False,) * gap + (True,) * 4
    assert got.loss_mask == own
    nothing = (0.0,) * gap
    assert got.logprobs == pytest.approx(
        (-0.5, -0.51, -0.52, *nothing, -1.0, -1.01, *nothing, -1.5, -1.51, -1.52, -1.53)
    )
    assert got.rewards == (0, 0, 1.0, *nothing, 0, 2.0, *nothing, 0, 0, 0, 3.0)
    assert got.finish_reason == "stop" and turns(got) == 3
    assert got.weight_version == 11
    assert got.token_versions == (11,) * (3 + gap) + (12,) * (2 + gap) + (13,) * 4
    assert other.sample == 1 and other.prompt == prompt
    assert runs(other, own=True) == [(40, EOS), (41, EOS), (42, EOS)]
    # What was asked: the ids so far, for the same sample, each turn with a seed of its own.
    asked = [(ids, seed) for ids, sample, _, seed in engine.asked if sample == 0]
    assert [ids for ids, _ in asked] == [
        prompt.ids,
        prompt.ids + got.response_ids[: 3 + gap],
        prompt.ids + got.response_ids[: 5 + 2 * gap],
    ]
    assert [seed for _, seed in asked] == [7, turn_seed(7, 2), turn_seed(7, 3)]
    assert len({7, turn_seed(7, 2), turn_seed(7, 3), turn_seed(8, 2)}) == 4


def test_tk09_what_the_policy_did_not_write_is_added_as_the_environments(environment: Environment):
    """A turn that was cut, or ended by another stop token, gets the template's end of a turn."""
    prompt = chat_prompt(0)
    closed = encode("<eos>\n<bos>tool\nok<eos>\n<bos>assistant\n")
    assert closed[0] == EOS
    for first, reason in (((30, 31, 33), "length"), ((30, 31, 10), "stop")):
        engine = Scripted({(0, 0): [first, (32, EOS), (35, EOS)]})
        (got,) = play(engine, [prompt], stage_of(environment, turn=3))
        assert got.response_ids[: 3 + len(closed)] == first + closed, reason
        assert got.loss_mask[: 3 + len(closed)] == (True,) * 3 + (False,) * len(closed)


def test_tk07_special_tokens_inside_a_turn_keep_their_place(environment: Environment):
    """The text leaves them out, the ids do not: text is for the environment alone."""
    said = (30, BOS, 31, EOS)
    asked = []
    inner = environment.ask
    environment.ask = lambda t: asked.extend(t) or inner(t)  # type: ignore[method-assign]
    (got,) = play(Scripted({(0, 0): [said]}), [chat_prompt(0, turns=1)], stage_of(environment))
    assert got.response_ids == said and len(got.logprobs) == 4 and got.loss_mask == ()
    assert "bos" not in asked[0].text
    assert asked[0].messages[-1] == {"role": "assistant", "content": asked[0].text}


def test_plain_text_is_continued_with_the_message_alone(environment: Environment):
    engine = Scripted({(0, 0): [(30, EOS), (31, EOS)]})
    prompt = plain_prompt(0, turns=2, say=" then 5")
    (got,) = play(engine, [prompt], stage_of(environment))
    assert got.response_ids == (30, EOS, *encode(" then 5"), 31, EOS)


# Limits

GAP = len(encode("\n<bos>tool\nok<eos>\n<bos>assistant\n"))


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(
    ("budget", "length", "reason", "turns_had", "rewards"),
    [
        (3 + GAP + 4, 3 + GAP + 4, "stop", 2, 3.0),  # all of it fits, to the last token
        (3 + GAP + 3, 3 + GAP + 3, "length", 2, 3.0),  # the second turn is cut
        (3 + GAP + 1, 3 + GAP + 1, "length", 2, 3.0),
        (3 + GAP, 3, "length", 1, 1.0),  # no room behind the message: it is left away
        (4, 3, "length", 1, 1.0),
        (3, 3, "length", 1, 1.0),
        (2, 2, "length", 1, 1.0),
    ],
)
def test_the_limit_of_the_whole_response(
    environment: Environment,
    concurrent: bool,
    budget: int,
    length: int,
    reason: str,
    turns_had: int,
    rewards: float,
):
    """Rewards are given for cut turns too; the reason of an ended episode is its last turn's."""
    script = {(0, 0): [(30, 31, EOS), (32, 33, 34, EOS)]}
    prompt = chat_prompt(0, turns=2)
    engine = Scripted(script, concurrent=concurrent)
    sampling = replace(SCRIPT, max_new_tokens=budget)
    (got,) = play(engine, [prompt], stage_of(environment), sampling=sampling)
    assert (len(got.response_ids), got.finish_reason) == (length, reason)
    assert turns(got) == turns_had and sum(got.rewards) == rewards
    assert got.mask[-1] and got.rewards[-1] == turns_had
    assert (
        got.response_ids
        == ((30, 31, EOS) + got.response_ids[3 : 3 + GAP] + (32, 33, 34, EOS))[:length]
    )


def test_turns_are_limited_in_number_and_length(environment: Environment):
    script = {(0, 0): [(30, 31, 33, EOS), (32, EOS), (34, EOS)]}
    engine = Scripted(script)
    (got,) = play(engine, [chat_prompt(0)], stage_of(environment, max_turns=2, turn=3))
    assert runs(got, own=True) == [(30, 31, 33), (32, EOS)]
    assert got.finish_reason == "length" and got.rewards[-1] == 2.0
    assert [limit for *_, limit, _ in engine.asked] == [3, 3]
    (cut,) = play(Scripted(script), [chat_prompt(0, turns=1)], stage_of(environment, turn=3))
    assert cut.response_ids == (30, 31, 33) and cut.finish_reason == "length"


@pytest.mark.parametrize("concurrent", [False, True])
def test_episodes_that_the_engine_leaves_out_are_missing(
    environment: Environment, concurrent: bool, caplog: pytest.LogCaptureFixture
):
    script = {(row, sample): [(30, EOS)] * 3 for row in range(2) for sample in range(2)}
    prompts = [chat_prompt(0), chat_prompt(1, turns=1)]
    lost = [(0, 1, 1), (0, 0, 2)]
    engine = Scripted(script, concurrent=concurrent, left_out=lost[:1])
    got = play(engine, prompts, stage_of(environment), samples=2)
    assert [(t.prompt.row, t.sample) for t in got] == [(0, 0), (1, 0), (1, 1)]
    engine = Scripted(script, concurrent=concurrent, left_out=lost)
    with caplog.at_level(logging.WARNING, "jaxrl.episodes"):
        if concurrent:
            got = play(engine, prompts, stage_of(environment), samples=2)
            assert [(t.prompt.row, t.sample) for t in got] == [(1, 0), (1, 1)]
            assert len(caplog.records) == 3  # with the one before
        with pytest.raises(LeftOut):
            play(
                Scripted(script, concurrent=concurrent, left_out=lost),
                prompts[:1],
                stage_of(environment),
                samples=2,
            )


# The trainer's own sampler


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_seeds_of_turns_are_numbers_that_engines_take(seed: int):
    found = [turn_seed(seed, turn) for turn in range(1, 50)]
    assert found[0] == seed and len(set(found)) == 49
    assert all(0 <= number < 2**64 for number in found)


@pytest.mark.parametrize("environment", ["over_at_once"], indirect=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_turn_is_a_completion_with_a_reward(
    engine: TrainsideEngine, environment: Environment, temperature: float
):
    prompts = [chat_prompt(row, f"{row} plus 4") for row in range(4)]
    sampling = replace(ASK, temperature=temperature, max_new_tokens=8)
    got = play(engine, prompts, stage_of(environment), sampling=sampling, samples=3)
    plain = play(engine, prompts, None, sampling=sampling, samples=3)
    rewarded = [replace(t, rewards=(0.0,) * (len(t.response_ids) - 1) + (0.5,)) for t in plain]
    assert got == rewarded
    assert {t.finish_reason for t in got} >= {"stop"}


@jax.jit
def trainers_logprobs(ids: jax.Array) -> jax.Array:
    """Of each token but the first, in its whole context, at temperature 0.7."""
    places, ones = jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), jnp.int32)
    hidden = MODEL.hidden(PARAMS, ids[None], places, ones, 0 * ones)
    return token_logprobs(hidden[:, :-1], MODEL.head(PARAMS), ids[None, 1:], temperature=0.7)[0]


def test_logprobs_are_the_trainers_in_the_context_that_was_accumulated(
    engine: TrainsideEngine, environment: Environment
):
    prompts = [chat_prompt(row, f"{row} plus 4") for row in range(4)]
    sampling = replace(ASK, temperature=0.7, max_new_tokens=64)
    got = play(engine, prompts, stage_of(environment, turn=8), sampling=sampling, samples=3)
    assert [(t.prompt.row, t.sample) for t in got] == [(r, s) for r in range(4) for s in range(3)]
    assert max(turns(t) for t in got) == 3
    for t in got:
        padded = np.zeros(112, np.int32)  # on the right, where causality keeps it out
        padded[: len(t.ids)] = t.ids
        own = np.asarray(trainers_logprobs(jnp.asarray(padded)))
        expected = own[len(t.prompt.ids) - 1 : len(t.ids) - 1]
        mask = np.asarray(t.mask)
        np.testing.assert_allclose(np.asarray(t.logprobs)[mask], expected[mask], atol=1e-4)
        assert not np.asarray(t.logprobs)[~mask].any()
        assert not np.asarray(t.rewards)[~mask].any()
        for said in runs(t, own=True):
            assert len(said) <= 8
            assert not set(said[:-1]) & set(STOPS)


def test_an_episode_depends_on_nobody_else(engine: TrainsideEngine, environment: Environment):
    """Twice the same; alone, in other company, and as a sample of its own number."""
    stage = stage_of(environment, turn=8)
    prompts = [chat_prompt(row, f"{row} plus 4") for row in range(4)]
    got = play(engine, prompts, stage, samples=3)
    assert got == play(engine, prompts, stage, samples=3)
    single = play(engine, prompts[1:2], stage, samples=3)
    assert [t.response_ids for t in single] == [t.response_ids for t in got[3:6]]
    (alone,) = play(engine, numbered(prompts[1:2], 2), stage)
    assert alone.sample == 2 and alone.response_ids == got[5].response_ids
    assert len({t.response_ids for t in got[:3]}) == 3
    other = play(engine, prompts, stage, samples=3, seed=8)
    assert all(a.response_ids != b.response_ids for a, b in zip(got, other, strict=True))
    third = runs(got[0], own=True)
    assert len(set(third)) == len(third)


def test_episodes_compile_few_programs(environment: Environment):
    """Turns of the same limits share programs: prompts grow through three buckets at most, and in
    each are read, begun and drawn on."""
    engine = TrainsideEngine(MODEL, PARAMS, batch_size=16)
    prompts = [chat_prompt(row, f"{row} plus 4", turns=2) for row in range(4)]
    for seed in range(3):
        play(engine, prompts, stage_of(environment, turn=8), samples=3, seed=seed)
    assert engine.compilations <= 3 * 3


def test_samples_are_numbered_from_the_first(engine: TrainsideEngine):
    prompts = [chat_prompt(row, f"{row} plus 4") for row in range(3)]
    asked: dict[str, Any] = {"sampling": replace(ASK, max_new_tokens=8), "seed": 3}
    whole = engine.generate(prompts, samples=3, **asked)
    later = engine.generate(numbered(prompts, 2), samples=3, **asked)
    assert [t.sample for t in later] == [2, 3, 4] * 3
    whole, later = whole[2::3], later[::3]
    assert [t.response_ids for t in later] == [t.response_ids for t in whole]


def test_limits_cut_and_are_refused_out_of_range(engine: TrainsideEngine):
    prompts = [chat_prompt(row, f"{row} plus 4") for row in range(3)]
    asked: dict[str, Any] = {"samples": 3, "sampling": replace(ASK, max_new_tokens=8), "seed": 3}
    whole = engine.generate(prompts, **asked)
    cut = engine.generate(prompts, limits=[1, 3, 8], **asked)
    for t, longer in zip(cut, whole, strict=True):
        limit = (1, 3, 8)[t.prompt.row]
        assert t.response_ids == longer.response_ids[:limit]
        assert t.logprobs == longer.logprobs[:limit]
        ended = len(longer.response_ids) <= limit
        assert t.finish_reason == (longer.finish_reason if ended else "length")
    assert {t.finish_reason for t in cut} == {"stop", "length"}
    for limits in ([1, 3], [1, 3, 9], [0, 3, 8]):
        with pytest.raises(RolloutError, match=r"limits=.* must be a number in \[1, max_new"):
            engine.generate(prompts, limits=limits, **asked)
