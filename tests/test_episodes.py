"""Episodes: what a trajectory of several turns is made of, by hand and with the trainer's sampler.

SGLang servers play in tests/rollout/sglang/test_episodes_sglang.py.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import (
    BOS,
    EOS,
    Scripted,
    chat_prompt,
    encode,
    numbered,
    plain_prompt,
    stage_of,
)

from jaxrl.environment import Environment
from jaxrl.episode import turns
from jaxrl.episodes import Stage, collect, turn_seed
from jaxrl.errors import RolloutError
from jaxrl.logprobs import token_logprobs
from jaxrl.models import Model
from jaxrl.rollout import TrainsideEngine
from jaxrl.rollout.engine import LeftOut
from jaxrl.stopping import StopRequested, StopSignal
from jaxrl.types import Prompt, Sampling, Trajectory
from tests.rollout.sglang.models import CONFIG, make_params

MODEL, PARAMS = Model(CONFIG), jax.tree.map(jnp.asarray, make_params())
STOPS = (EOS, *range(10, 500, 6))
"""Many: a random model would hardly ever say EOS."""
ASK = Sampling(max_new_tokens=40, stop_token_ids=STOPS)
SCRIPT = Sampling(max_new_tokens=80, stop_token_ids=(EOS, 10))


@pytest.fixture(scope="module")
def engine() -> TrainsideEngine:
    return TrainsideEngine(MODEL, PARAMS, batch_size=16)


@pytest.fixture
def environment(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """`playing:counts`, or the one a test asks for."""
    name = getattr(request, "param", "counts")
    with closing(Environment(f"playing:{name}", 5.0)) as made:
        yield made


def play(engine: Any, prompts: Sequence[Prompt], stage: Stage | None, **changes: Any) -> Any:
    sampling = SCRIPT if hasattr(engine, "script") else ASK
    given = {"samples": 1, "sampling": sampling, "seed": 7} | changes
    return collect(engine, prompts, stage, **given)


def runs(trajectory: Trajectory, own: bool) -> list[tuple[int, ...]]:
    """Stretches of the policy's tokens, or of the environment's."""
    found: list[list[int]] = []
    before = not own
    for token, mine in zip(trajectory.response_ids, trajectory.mask, strict=True):
        if mine == own:
            if before != own:
                found.append([])
            found[-1].append(token)
        before = mine
    return [tuple(ids) for ids in found]


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


# What the environment may not do


@pytest.mark.parametrize("environment", ["goes_on"], indirect=True)
def test_what_the_environment_does_to_its_messages_changes_nothing(environment: Environment):
    """A string is a user's message."""
    prompt = chat_prompt(0)
    engine = Scripted({(0, 0): [(30, EOS), (31, EOS), (32, EOS)]})
    (got,) = play(engine, [prompt], stage_of(environment, max_turns=3))
    assert runs(got, own=False) == [encode("\n<bos>user\nmore<eos>\n<bos>assistant\n")] * 2
    assert got.prompt.messages == ({"role": "user", "content": "3 plus 4"},)


@pytest.mark.parametrize("environment", ["gives"], indirect=True)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("None", r"it returned None"),
        ("('more', 0.0)", r"it returned \('more', 0.0\)"),
        ("['more', 0.0, False]", r"it returned \["),
        ("('more', None, False)", "the reward is None, not a finite number"),
        ("('more', float('nan'), True)", "the reward is nan"),
        ("('more', 1e39, True)", "the reward is 1e"),
        ("('more', '1', False)", "the reward is '1'"),
        ("('more', 0.0, 'no')", "over is 'no', not a bool"),
        ("(None, 0.0, False)", "no message, though the episode is not over"),
        ("(5, 0.0, False)", "the message is 5, neither a dict nor a string"),
        ("({'role': 'tool'}, 0.0, False)", "role and content must be strings"),
        ("({'role': 'tool', 'content': 5}, 0.0, False)", "role and content must be strings"),
        ("({'role': 'assistant', 'content': ''}, 0.0, False)", "the role assistant"),
        ("1 // 0", r"raised an exception:\n(?s:.*)in gives(?s:.*)ZeroDivisionError"),
    ],
)
def test_an_unusable_answer_names_row_and_turn(environment: Environment, answer: str, said: str):
    prompts = [chat_prompt(3, answer="('', 0.0, True)"), chat_prompt(44, answer=answer)]
    engine = Scripted({(row, 0): [(30, EOS)] * 2 for row in (3, 44)})
    where = "prompt row 44, sample 0, turn 2: rollout.env=playing:gives "
    with pytest.raises(RolloutError, match=where + f"(must return .*)?{said}"):
        play(engine, prompts, stage_of(environment))


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_call_that_hangs_is_ended(concurrent: bool):
    engine = Scripted({(row, 0): [(30, EOS)] * 9 for row in range(3)}, concurrent=concurrent)
    prompts = [chat_prompt(row, who=row, turns=9) for row in range(3)]
    with closing(Environment("playing:slow_for_row_0", 0.2)) as environment:
        begun = time.monotonic()
        with pytest.raises(RolloutError, match=r"row 0, sample 0, turn 1: .* longer than 0.2 s"):
            play(engine, prompts, stage_of(environment))
        assert time.monotonic() - begun < 1.2


def test_an_error_ends_the_other_episodes_at_their_next_turn():
    """Row 0 takes too long; the others would go on for 400 turns of the environment."""
    script = {(row, 0): [(30, EOS)] * 400 for row in range(2)}
    engine = Scripted(script, concurrent=True)
    prompts = [chat_prompt(row, who=row, turns=400) for row in range(2)]
    sampling = replace(SCRIPT, max_new_tokens=10**6)
    with closing(Environment("playing:slow_for_row_0", 0.2)) as environment:
        stage = stage_of(environment, max_turns=400)
        with pytest.raises(RolloutError, match="row 0, sample 0, turn 1"):
            play(engine, prompts, stage, sampling=sampling)
    assert engine.turns[1, 0] < 400


def test_a_call_that_blocks_all_others_is_found():
    """No time limit of asyncio would ever be looked at."""
    with closing(Environment("playing:blocks", 0.2)) as environment:
        with pytest.raises(RolloutError, match="blocked the event loop .* row 4, sample 0, turn 1"):
            play(Scripted({(4, 0): [(30, EOS)]}), [chat_prompt(4)], stage_of(environment))


@pytest.mark.parametrize("environment", ["meets"], indirect=True)
@pytest.mark.parametrize("concurrent", [False, True])
def test_calls_of_a_round_run_side_by_side(environment: Environment, concurrent: bool):
    """Each of the three waits for the other two."""
    engine = Scripted({(0, sample): [(30, EOS)] for sample in range(3)}, concurrent=concurrent)
    assert len(play(engine, [chat_prompt(0)], stage_of(environment), samples=3)) == 3


def test_with_servers_a_slow_episode_holds_up_no_other():
    engine = Scripted({(row, 0): [(30, EOS)] * 3 for row in range(3)}, concurrent=True)
    prompts = [chat_prompt(row, who=row, turns=3) for row in range(3)]
    ended: list[int] = []
    with closing(Environment("playing:slow_for_row_0", 5.0)) as environment:
        got = play(
            engine,
            prompts,
            stage_of(environment),
            on_done=lambda done: ended.extend(t.prompt.row for t in done),
        )
    assert [t.prompt.row for t in got] == [0, 1, 2]
    assert ended[-1] == 0 and sorted(ended) == [0, 1, 2]
    # The others had their last turn before row 0's environment had answered its first.
    last = {t.prompt.row: t.rewards[-1] for t in got}
    assert max(last[1], last[2]) < got[0].rewards[1] + 1e-3


def test_the_name_is_checked_at_the_start():
    with pytest.raises(ValueError, match="rollout.env='playing:nothing' cannot be used"):
        Environment("playing:nothing", 1.0)
    with pytest.raises(ValueError, match="'playing:not_async' must be an async function"):
        Environment("playing:not_async", 1.0)


def test_columns_are_checked_at_the_start():
    with closing(Environment("playing:gives", 1.0)) as environment:
        environment.check([chat_prompt(0, answer="1", other=2)])
        with pytest.raises(ValueError, match="row 8: .* columns other: missing .*'answer'"):
            environment.check([chat_prompt(0, answer="1"), chat_prompt(8, other=2)])
        with pytest.raises(ValueError, match="row 8 has a column 'text'"):
            environment.check([chat_prompt(8, answer="1", text="")])


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
    """Turns of the same limits share programs: prompts grow through buckets, nothing else moves."""
    engine = TrainsideEngine(MODEL, PARAMS, batch_size=16)
    prompts = [chat_prompt(row, f"{row} plus 4", turns=2) for row in range(4)]
    for seed in range(3):
        play(engine, prompts, stage_of(environment, turn=8), samples=3, seed=seed)
    assert engine.compilations <= 3


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


@pytest.mark.parametrize("concurrent", [False, True])
def test_ck06_a_signal_does_not_wait_for_the_environment(concurrent: bool):
    """Row 0's environment takes a second a turn, for nine turns."""
    engine = Scripted({(0, 0): [(30, EOS)] * 9}, concurrent=concurrent)
    with closing(Environment("playing:slow_for_row_0", 5.0)) as environment, StopSignal() as stop:
        ask = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        begun = time.monotonic()
        ask.start()
        with pytest.raises(StopRequested, match="SIGTERM"), stop.at_once():
            play(engine, [chat_prompt(0, who=0, turns=9)], stage_of(environment))
        assert time.monotonic() - begun < 0.9
    assert engine.turns[0, 0] == 1
