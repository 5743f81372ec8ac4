"""A real server behind a proxy that fails on order: every prompt once, or one clear error."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.errors import RolloutError
from jaxrl.rollout.sglang.engine import SGLangEngine
from tests.rollout.sglang.asking import (
    GREEDY,
    LONG,
    PROMPTS,
    each_once,
    engine_of,
    honest,
    later,
    rollout,
)
from tests.rollout.sglang.faulty import (
    Alter,
    Answer,
    CutAfter,
    CutBefore,
    CutWithin,
    Delay,
    Fault,
    FaultyProxy,
    Hang,
)
from tests.rollout.sglang.servers import RunningServer

WHOLE = len(PROMPTS) * 2


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.url) as faulty:
        yield faulty


@pytest.fixture
def engine(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path, params: Any
) -> Iterator[SGLangEngine]:
    """On the proxy, with the first weights published; impatient."""
    settings = rollout(
        proxy.url, request_timeout_s=2.0, health_timeout_s=2.0, gone_timeout_s=20.0, attempts=3
    )
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        yield engine


def ask(engine: SGLangEngine) -> list[Any]:
    return engine.generate(PROMPTS, samples=2, sampling=GREEDY, seed=0)


def meta(change: Callable[[dict[str, Any]], Any]) -> Alter:
    """A fault in the answer's meta_info."""

    def altered(answer: Any) -> Any:
        change(answer["meta_info"])
        return answer

    return Alter(altered)


PASSING: dict[str, Fault] = {
    "500": Answer(500, "Internal Server Error"),
    "503": Answer(503, {"error": {"message": "no available workers"}}),
    "429": Answer(429, {"error": "too many requests"}),
    "hang": Hang(),
    "cut before": CutBefore(),
    "RC-04 cut after": CutAfter(),
    "cut within": CutWithin(),
    "too few results": Alter(lambda answer: []),
    "half a group": Alter(lambda answer: [answer]),
    "not JSON": Answer(200, "<html>busy</html>"),
    "RC-09 null": meta(lambda m: m["output_token_logprobs"][0].__setitem__(0, None)),
    "RC-10 lengths": meta(lambda m: m["output_token_logprobs"].pop()),
    "RC-12 stripped": meta(lambda m: m.pop("output_token_logprobs")),
    "aborted": meta(lambda m: m.update(finish_reason={"type": "abort", "message": "Aborted"})),
    "another id": meta(lambda m: m.update(id="somebody-else")),
    "unknown weights": meta(
        lambda m: m.update(weight_versions=[{"version": "default", "start": 0, "end": 12}])
    ),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_asked_again_with_the_same_id_and_answered_once(
    engine: SGLangEngine, proxy: FaultyProxy, params: Any, fault: str
):
    before = sum(proxy.rids().values())
    proxy.order("/generate", PASSING[fault], times=3)
    got = ask(engine)
    each_once(got, 2)
    honest(params, got)
    asked = proxy.rids()
    assert sum(asked.values()) - before >= WHOLE + 3
    assert engine.figures()["rollout/retries"] >= 3
    assert len([rid for rid in asked if rid and rid.count("-") == 2]) == WHOLE


LASTING: dict[str, tuple[Fault, str]] = {
    "500": (Answer(500, "Internal Server Error"), "no answer after 3 attempts.*500 Internal"),
    "RC-07 hang": (Hang(), "no answer after 3 attempts.*no answer within 2 s"),
    "cut": (CutBefore(), "no answer after 3 attempts"),
}


@pytest.mark.parametrize("fault", LASTING)
def test_what_lasts_is_one_clear_error(engine: SGLangEngine, proxy: FaultyProxy, fault: str):
    order, message = LASTING[fault]
    proxy.order("/generate", order, times=10_000)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match=message) as caught:
        ask(engine)
    assert "prompt row" in str(caught.value)
    assert time.monotonic() - begin < 3 * (3 + 1) + 15
    proxy.cancel_orders()
    each_once(ask(engine), 2)  # and nothing of it is left behind


def publish_once_it_is_back(engine: SGLangEngine, params: Any) -> None:
    """A busy machine may need more than the few seconds that these tests give a server."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return engine.publish(params, 2)
        except RolloutError:
            if time.monotonic() > deadline:
                raise


def test_a_server_that_is_gone_for_good_is_one_clear_error(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path, params: Any
):
    settings = rollout(proxy.url, health_timeout_s=4.0, gone_timeout_s=4.0)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        proxy.down = True
        with pytest.raises(RolloutError, match=f"no usable server .*{proxy.url}: (GET|POST)"):
            ask(engine)
        with pytest.raises(RolloutError, match="no usable server"):
            engine.publish(params, 1)
        proxy.down = False
        publish_once_it_is_back(engine, params)
        assert {t.weight_version for t in ask(engine)} == {2}


def test_rc05_what_is_refused_for_good_is_asked_once_and_left_out(
    engine: SGLangEngine, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
):
    """A prompt beyond the server's context: the real server's own 400."""
    long = dataclasses.replace(PROMPTS[0], row=50, ids=(5,) * 511)
    before = len(proxy.bodies("/generate"))
    got = engine.generate([long, *PROMPTS], samples=2, sampling=GREEDY, seed=0)
    each_once(got, 2)
    bodies = proxy.bodies("/generate")[before:]
    assert sum(len(body["input_ids"]) == 511 for body in bodies) == 2
    assert "left out: prompt row 50, sample 1: " in caplog.text
    assert "maximum context length" in caplog.text
    with pytest.raises(RolloutError, match="none of 2 completions came back"):
        engine.generate([long], samples=2, sampling=GREEDY, seed=0)


def test_rc09_an_answer_that_never_has_logprobs_is_left_out_and_told(
    engine: SGLangEngine, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
):
    proxy.order("/generate", PASSING["RC-09 null"], times=10_000)
    with pytest.raises(RolloutError, match="none of 16 .*log-probability of response token 0"):
        ask(engine)
    proxy.cancel_orders()
    proxy.order("/generate", PASSING["RC-09 null"], times=WHOLE * 2 + 3)
    got = ask(engine)
    assert len(got) == WHOLE - 3 or len(got) >= WHOLE // 2
    assert "left out" in caplog.text


def test_rc08_concurrency_is_bounded_and_waiting_is_no_timeout(
    proxy: FaultyProxy, tiny_model: Path, tmp_path: Path, params: Any
):
    """64 answers of a third of a second, 8 at a time, each allowed one second: all come."""
    settings = rollout(proxy.url, concurrency=8, request_timeout_s=1.5)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        proxy.order("/generate", Delay(0.3), times=64)
        got = engine.generate(PROMPTS, samples=8, sampling=GREEDY, seed=0)
        each_once(got, 8)
        assert engine.figures()["rollout/retries"] == 0
    assert proxy.most_in_flight["/generate"] == 8


def test_long_prompts_do_not_hold_back_short_ones(engine: SGLangEngine, proxy: FaultyProxy):
    """Groups are handed on as they complete, whatever their place."""
    finished: list[int] = []
    proxy.order("/generate", Delay(1.2), times=2)  # the first prompt's two samples
    got = engine.generate(
        PROMPTS,
        samples=2,
        sampling=GREEDY,
        seed=0,
        on_done=lambda group: finished.append(group[0].prompt.row),
    )
    each_once(got, 2)
    assert finished[-1] == 0 and sorted(finished) == list(range(len(PROMPTS)))


STEPS = [
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
    "/model_info",
    "/generate",  # the probe
]


@pytest.mark.parametrize("how", [CutBefore(), CutAfter(), Answer(500, "no"), Hang()], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_a_publish_broken_off_at_any_step_ends_with_the_new_weights(
    engine: SGLangEngine,
    proxy: FaultyProxy,
    other_params: Any,
    step: str,
    how: Fault,
    monkeypatch: pytest.MonkeyPatch,
):
    for seat in engine._pool.servers:
        seat.client._timeout_s = 2.0  # of control calls: a hang is found at once
    proxy.order(step, how)
    engine.publish(other_params, 1)
    proxy.cancel_orders()
    got = ask(engine)
    each_once(got, 2)
    assert {t.weight_version for t in got} == {1}
    honest(other_params, got)


@pytest.mark.parametrize("step", STEPS)
def test_a_trainer_that_dies_while_publishing_leaves_servers_that_the_next_one_can_use(
    proxy: FaultyProxy,
    tiny_model: Path,
    tmp_path: Path,
    params: Any,
    other_params: Any,
    step: str,
):
    """Its call never returns, and nothing of what it would have done after that is done."""
    settings = rollout(proxy.url, gone_timeout_s=30.0)
    first = engine_of(settings, tiny_model, tmp_path / "first")
    first.publish(params, 0)
    proxy.order(step, Hang())
    stuck = later(0.0, lambda: _until_closed(first, other_params))
    deadline = time.monotonic() + 20
    seen = proxy.count(step)
    while proxy.count(step) == seen and time.monotonic() < deadline:
        time.sleep(0.02)
    proxy.cancel_orders()
    with closing(engine_of(settings, tiny_model, tmp_path / "second")) as second:
        second.publish(other_params, 7)
        got = ask(second)
        each_once(got, 2)
        assert {t.weight_version for t in got} == {7}
        honest(other_params, got)
    first.close()
    stuck.join(30)


def _until_closed(engine: SGLangEngine, params: Any) -> None:
    try:
        engine.publish(params, 1)
    except BaseException:  # noqa: BLE001  cancelled by close
        pass


@pytest.mark.parametrize("status", [200, 400])
def test_ws03_a_server_that_says_no_is_not_taken_for_updated(
    engine: SGLangEngine, proxy: FaultyProxy, other_params: Any, params: Any, status: int
):
    no = Answer(status, {"success": False, "message": "no such folder on this host"})
    proxy.order("/update_weights_from_disk", no, times=100)
    with pytest.raises(RolloutError, match="no such folder on this host"):
        engine.publish(other_params, 1)
    assert engine.figures()["rollout/servers_up"] == 0.0  # nothing is asked of it
    proxy.cancel_orders()
    engine.publish(other_params, 2)
    got = ask(engine)
    assert {t.weight_version for t in got} == {2}
    honest(other_params, got)


def test_a_server_that_does_not_say_what_the_trainer_says_is_left_out(
    engine: SGLangEngine, proxy: FaultyProxy, other_params: Any
):
    """WS-06: the version is right, the probe's log-probabilities are not."""

    def worse(m: dict[str, Any]) -> None:
        for entry in m["input_token_logprobs"][1:]:
            entry[0] -= 0.5

    proxy.order("/generate", meta(worse), times=100)
    with pytest.raises(RolloutError, match="0.5"):
        engine.publish(other_params, 1)
    proxy.cancel_orders()
    engine.publish(other_params, 2)
    np.testing.assert_array_equal({t.weight_version for t in ask(engine)}, {2})


def test_long_requests_in_flight_survive_a_publish_that_is_broken_off(
    engine: SGLangEngine, proxy: FaultyProxy, params: Any, other_params: Any
):
    import threading

    engine._pool.limits = dataclasses.replace(engine._pool.limits, request_s=60.0)
    got: list[Any] = []
    asking = threading.Thread(
        target=lambda: got.extend(engine.generate(PROMPTS, samples=4, sampling=LONG, seed=0))
    )
    asking.start()
    time.sleep(0.4)
    proxy.order("/continue_generation", CutBefore())
    engine.publish(other_params, 1)
    asking.join(120)
    each_once(got, 4)
