"""Episodes with a real server: those of the trainer's sampler, and faults between two turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playing import EOS, chat_prompt, numbered, stage_of

from jaxrl.environment import Environment
from jaxrl.episode import turns
from jaxrl.episodes import Stage, collect
from jaxrl.errors import RolloutError
from jaxrl.rollout import TrainsideEngine
from jaxrl.rollout.sglang.engine import SGLangEngine
from jaxrl.types import Sampling, Trajectory
from tests.rollout.sglang.asking import MODEL, engine_of, rollout, scored
from tests.rollout.sglang.faulty import Alter, Answer, CutAfter, FaultyProxy
from tests.rollout.sglang.servers import RunningServer

STOPS = (EOS, *range(10, 500, 6))
ASK = Sampling(max_new_tokens=70, stop_token_ids=STOPS)
GREEDY = replace(ASK, temperature=0.0)
PROMPTS = [chat_prompt(row, f"{row} plus 4") for row in range(4)]


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.url) as faulty:
        yield faulty


@pytest.fixture
def engine(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path, params: Any
) -> Iterator[SGLangEngine]:
    with closing(engine_of(rollout(proxy.url), tiny_model, tmp_path)) as made:
        made.publish(params, 3)
        proxy._asked.clear()
        yield made


@pytest.fixture
def stage() -> Iterator[Stage]:
    with closing(Environment("playing:counts", 10.0)) as environment:
        yield stage_of(environment, turn=10)


def play(engine: Any, stage: Stage, sampling: Sampling = GREEDY, **changes: Any) -> Any:
    prompts = changes.pop("prompts", PROMPTS)
    given = {"samples": 2, "sampling": sampling, "seed": 7} | changes
    return collect(engine, prompts, stage, **given)


def same(got: Sequence[Trajectory], own: Sequence[Trajectory]) -> None:
    for name in ("prompt", "sample", "response_ids", "loss_mask", "rewards", "finish_reason"):
        assert [getattr(t, name) for t in got] == [getattr(t, name) for t in own], name
    for theirs, ours in zip(got, own, strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def trainside(params: Any) -> list[Trajectory]:
    """What the trainer's sampler says, greedily."""
    own = TrainsideEngine(MODEL, params, batch_size=16)
    with closing(Environment("playing:counts", 10.0)) as environment:
        stage = stage_of(environment, turn=10)
        return collect(own, PROMPTS, stage, samples=2, sampling=GREEDY, seed=7)


def test_greedy_episodes_are_those_of_the_trainside_sampler(
    engine: SGLangEngine, stage: Stage, trainside: list[Trajectory]
):
    told: list[Trajectory] = []
    got = play(engine, stage, on_done=told.extend)
    same(got, trainside)
    assert sorted((t.prompt.row, t.sample) for t in told) == [
        (row, sample) for row in range(4) for sample in range(2)
    ]
    assert max(turns(t) for t in got) == 3
    assert {t.weight_version for t in got} == {3}


def test_tk07_tk09_sampled_episodes_hold_what_the_server_said(
    engine: SGLangEngine, proxy: FaultyProxy, stage: Stage, params: Any
):
    """Ids exactly as they came, asked on top of each other; log-probabilities in that context."""
    replies: list[dict[str, Any]] = []

    def note(reply: Any) -> Any:
        replies.append(reply)
        return reply

    proxy.order("/generate", Alter(note), times=1000)
    sampling = replace(ASK, temperature=0.7)
    got = play(engine, stage, sampling)
    bodies = [asked.body for asked in proxy._asked if asked.path == "/generate"]
    by_rid = {reply["meta_info"]["id"]: reply for reply in replies}
    assert len(bodies) == len(by_rid) == sum(turns(t) for t in got)
    for t in got:
        mine = [b for b in bodies if tuple(b["input_ids"]) == t.ids[: len(b["input_ids"])]]
        mine.sort(key=lambda body: len(body["input_ids"]))
        said: set[int] = set()
        for body in mine:
            at = len(body["input_ids"]) - len(t.prompt.ids)
            ids = by_rid[body["rid"]]["output_ids"]
            if tuple(ids) != t.response_ids[at : at + len(ids)]:
                continue  # the other sample's first turn
            assert all(t.mask[at : at + len(ids)])
            said |= set(range(at, at + len(ids)))
            asked_for = body["sampling_params"]["max_new_tokens"]
            assert asked_for == min(10, 70 - at)  # never beyond what was announced to the server
        assert said == set(np.flatnonzero(t.mask))
        own = np.asarray(t.mask)
        logprobs = np.asarray(t.logprobs)
        assert not logprobs[~own].any()
        if t.sample == 0:
            np.testing.assert_allclose(logprobs[own], scored(params, t, 0.7)[own], atol=1e-4)
        assert (t.finish_reason == "stop") <= (t.response_ids[-1] in STOPS)


def test_seeds_follow_sample_and_turn(engine: SGLangEngine):
    """The CPU server draws as it likes; what is asked of it is the run's."""
    whole = engine._requests(PROMPTS, 3, ASK, 9)
    later = engine._requests(numbered(PROMPTS, 2), 1, ASK, 9)
    assert [r.sample for r in later] == [2] * 4
    assert [r.seed for r in later] == [r.seed for r in whole[2::3]]
    limited = engine._requests(PROMPTS, 2, ASK, 9, [1, 2, 3, 70])
    assert [r.sampling.max_new_tokens for r in limited] == [1, 1, 2, 2, 3, 3, 70, 70]


def test_every_turn_has_its_own_seed_and_the_same_again(
    engine: SGLangEngine, proxy: FaultyProxy, stage: Stage
):
    def asked() -> list[tuple[tuple[int, ...], int]]:
        bodies = [a.body for a in proxy._asked if a.path == "/generate"]
        proxy._asked.clear()
        return sorted(
            (tuple(body["input_ids"]), body["sampling_params"]["sampling_seed"]) for body in bodies
        )

    play(engine, stage)
    first = asked()
    play(engine, stage)
    assert asked() == first
    assert len({seed for _, seed in first}) == len(first)


def test_faults_between_turns_change_nothing(
    engine: SGLangEngine, proxy: FaultyProxy, stage: Stage, trainside: list[Trajectory]
):
    """Busy, cut off, and a partial answer: asked again, with the ids of that turn."""

    def aborted(reply: Any) -> Any:
        reply["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
        return reply

    for fault in (Answer(503, "busy"), CutAfter(), Alter(aborted)):
        proxy.order("/generate", fault, times=2)
    got = play(engine, stage)
    same(got, trainside)
    assert engine.figures()["rollout/retries"] >= 6.0


def test_an_episode_that_is_refused_is_left_out(
    engine: SGLangEngine, proxy: FaultyProxy, stage: Stage
):
    proxy.order("/generate", Answer(400, {"error": {"message": "no"}}), times=1)
    assert len(play(engine, stage)) == 7
    proxy.order("/generate", Answer(400, {"error": {"message": "no"}}), times=1000)
    with pytest.raises(RolloutError, match="none of 8 episodes"):
        play(engine, stage)


def test_an_environments_error_ends_the_call(engine: SGLangEngine):
    fine = "(None, 0.0, True)"
    prompts = [chat_prompt(row, answer="1 // 0" if row == 2 else fine) for row in range(4)]
    with closing(Environment("playing:gives", 10.0)) as environment:
        with pytest.raises(RolloutError, match=r"row 2, sample \d, turn 2: (?s:.*)ZeroDivision"):
            play(engine, stage_of(environment, turn=10), prompts=prompts)
