"""The engine against real servers: the same numbers, and servers that die, hang and come back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.errors import RolloutError
from jaxrl.rollout import TrainsideEngine
from jaxrl.rollout.sglang.engine import SGLangEngine
from jaxrl.types import Prompt, Sampling, Trajectory
from tests.rollout.sglang.asking import (
    GREEDY,
    LONG,
    MODEL,
    PROMPTS,
    each_once,
    engine_of,
    honest,
    once_busy,
    rollout,
    scored,
)
from tests.rollout.sglang.models import EOS
from tests.rollout.sglang.servers import RunningServer, free_port, start_server


@pytest.fixture
def second(tiny_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server of the test's own, to be killed."""
    running = start_server(tiny_model, log=tmp_path / "second.log")
    yield running.wait_healthy()
    running.stop()


@pytest.mark.parametrize("publish", ["disk", "tensor"])
def test_greedy_says_what_the_trainside_sampler_says(
    server: RunningServer, tiny_model: Path, tmp_path: Path, other_params: Any, publish: str
):
    settings = rollout(server.url, publish=publish, bucket_bytes=50_000)
    done: list[int] = []
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(other_params, 3)
        got = engine.generate(
            PROMPTS, samples=2, sampling=GREEDY, seed=0, on_done=lambda t: done.append(len(t))
        )
        assert engine.figures()["rollout/retries"] == 0.0
    assert done == [2] * len(PROMPTS)  # each prompt is handed on when it is complete
    trainside = TrainsideEngine(MODEL, other_params, batch_size=16)
    own = trainside.generate(PROMPTS, samples=2, sampling=GREEDY, seed=0)
    each_once(got, 2)
    assert [t.response_ids for t in got] == [t.response_ids for t in own]
    assert [t.finish_reason for t in got] == [t.finish_reason for t in own]
    for ours, theirs in zip(own, got, strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-4)
    assert {t.weight_version for t in got} == {3}
    assert not (tmp_path / "weights").exists() or not any((tmp_path / "weights").iterdir())


def test_sampling_reports_the_sampling_temperature(
    server: RunningServer, tiny_model: Path, tmp_path: Path, params: Any
):
    sampling = Sampling(max_new_tokens=20, temperature=0.6, stop_token_ids=(EOS,))
    with closing(engine_of(rollout(server.url), tiny_model, tmp_path)) as engine:
        with pytest.raises(RolloutError, match="no weights have been published"):
            engine.generate(PROMPTS, samples=1, sampling=sampling, seed=0)
        engine.publish(params, 0)
        got = engine.generate(PROMPTS, samples=4, sampling=sampling, seed=0)
    each_once(got, 4)
    honest(params, got, 0.6)
    assert len({t.response_ids for t in got[:4]}) > 1


def test_bad_requests_never_reach_a_server(
    server: RunningServer, tiny_model: Path, tmp_path: Path, params: Any
):
    """An empty prompt in a batch or an id beyond the vocabulary would kill it."""
    with closing(engine_of(rollout(server.url), tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        for ids in ((), (5, 512), (-1,)):
            bad = Prompt(row=77, ids=ids, text="", columns={})
            with pytest.raises(RolloutError, match="prompt row 77"):
                engine.generate([*PROMPTS, bad], samples=1, sampling=GREEDY, seed=0)
        assert server.healthy()
        each_once(engine.generate(PROMPTS, samples=1, sampling=GREEDY, seed=0), 1)


def test_rc01_proxy_variables_are_for_others(
    server: RunningServer,
    tiny_model: Path,
    tmp_path: Path,
    params: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "[::::malformed")
    with closing(engine_of(rollout(server.url), tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        each_once(engine.generate(PROMPTS, samples=1, sampling=GREEDY, seed=0), 1)


def test_a_context_that_is_too_short_is_found_at_the_start(
    server: RunningServer, tiny_model: Path, tmp_path: Path
):
    with pytest.raises(RolloutError, match="--context-length 512.* = 600"):
        SGLangEngine(
            MODEL,
            rollout(server.url),
            source=str(tiny_model),
            run_dir=tmp_path,
            probe_ids=(5, 6),
            max_tokens=600,
        )


def test_weights_published_under_way_are_told_apart_by_token(
    server: RunningServer, tiny_model: Path, tmp_path: Path, params: Any, other_params: Any
):
    """WS-04: a request that began with the old weights and ended with the new says so."""
    with closing(engine_of(rollout(server.url), tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        got: list[Trajectory] = []
        asked = threading.Thread(
            target=lambda: got.extend(engine.generate(PROMPTS, samples=4, sampling=LONG, seed=0))
        )
        asked.start()
        once_busy(engine, server.url, lambda: engine.publish(other_params, 1)).join()
        asked.join(120)
    each_once(got, 4)
    mixed = [t for t in got if t.token_versions]
    assert mixed
    for t in mixed:
        assert t.weight_version == 0 and set(t.token_versions) == {0, 1}
        assert list(t.token_versions) == sorted(t.token_versions)
        old = np.asarray(t.token_versions) == 0
        for weights, mask in ((params, old), (other_params, ~old)):
            own = scored(weights, t, LONG.temperature)
            np.testing.assert_allclose(np.asarray(t.logprobs)[mask], own[mask], atol=1e-4)


def test_killed_in_the_middle_the_other_server_takes_over(
    server: RunningServer, second: RunningServer, tiny_model: Path, tmp_path: Path, params: Any
):
    settings = rollout(server.url, second.url, concurrency=8)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        killer = once_busy(engine, second.url, second.kill)
        got = engine.generate(PROMPTS, samples=3, sampling=LONG, seed=0)
        killer.join()
        assert engine.figures()["rollout/servers_up"] == 1.0
        assert engine.figures()["rollout/retries"] > 0.0
        each_once(got, 3)
        honest(params, got, LONG.temperature)
        engine.publish(params, 1)  # goes on with what is left
        again = engine.generate(PROMPTS, samples=1, sampling=GREEDY, seed=0)
        assert {t.weight_version for t in again} == {1}


def test_ws08_killed_and_restarted_it_gets_the_weights_before_it_is_asked(
    second: RunningServer, tiny_model: Path, tmp_path: Path, other_params: Any
):
    """The only server: requests wait for it. It comes back with the weights it was started with."""
    port = int(second.url.rsplit(":", 1)[1])
    restarted: list[RunningServer] = []

    def restart() -> None:
        second.kill()
        restarted.append(start_server(tiny_model, port, log=tmp_path / "restarted.log"))

    with closing(engine_of(rollout(second.url), tiny_model, tmp_path)) as engine:
        engine.publish(other_params, 4)
        thread = once_busy(engine, second.url, restart)
        got = engine.generate(PROMPTS, samples=3, sampling=LONG, seed=0)
        thread.join()
        restarted[0].stop()
    each_once(got, 3)
    honest(other_params, got, LONG.temperature)
    assert {t.weight_version for t in got} == {4}


def test_killed_and_alone_is_one_clear_error(
    second: RunningServer, tiny_model: Path, tmp_path: Path, params: Any
):
    settings = rollout(second.url, gone_timeout_s=3.0)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        once_busy(engine, second.url, second.kill)
        begin = time.monotonic()
        with pytest.raises(RolloutError, match=f"no usable server .*=3 s.*{second.url}"):
            engine.generate(PROMPTS, samples=3, sampling=LONG, seed=0)
        assert time.monotonic() - begin < 30


def test_a_server_that_hangs_is_left_out_and_let_back_in(
    server: RunningServer, second: RunningServer, tiny_model: Path, tmp_path: Path, params: Any
):
    settings = rollout(server.url, second.url, concurrency=8, health_timeout_s=2.0)
    with closing(engine_of(settings, tiny_model, tmp_path)) as engine:
        engine.publish(params, 0)
        once_busy(engine, second.url, second.freeze)
        got = engine.generate(PROMPTS, samples=3, sampling=LONG, seed=0)
        each_once(got, 3)
        honest(params, got, LONG.temperature)
        assert engine.figures()["rollout/servers_up"] == 1.0
        second.thaw()
        deadline = time.monotonic() + 60
        while engine.figures()["rollout/servers_up"] < 2.0:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        engine.publish(params, 1)
        each_once(engine.generate(PROMPTS, samples=3, sampling=GREEDY, seed=0), 3)


def test_launched_servers_are_revived_and_end_with_the_engine(
    tiny_model: Path, tmp_path: Path, other_params: Any
):
    port = free_port()
    settings = rollout(
        f"http://127.0.0.1:{port}",
        launch="scripts/serve_sglang_cpu.sh {model} --host {host} --port {port} "
        "--context-length 512 --max-total-tokens 8192",
    )
    engine = engine_of(settings, tiny_model, tmp_path)
    with closing(engine):
        engine.publish(other_params, 2)
        assert engine._processes is not None
        (child,) = engine._processes._children.values()
        keeper = child._keeper
        assert keeper is not None
        listed = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text()
        once_busy(
            engine, settings.urls[0], lambda: os.killpg(int(listed.split()[0]), signal.SIGKILL)
        )
        got = engine.generate(PROMPTS, samples=3, sampling=LONG, seed=0)
    each_once(got, 3)
    honest(other_params, got, LONG.temperature)
    assert (tmp_path / "servers/server-0.log").read_text().count("Uvicorn running") == 2
    time.sleep(0.5)
    with pytest.raises(RolloutError, match="no usable server"):
        engine_of(rollout(f"http://127.0.0.1:{port}", gone_timeout_s=1.0), tiny_model, tmp_path)


def test_a_launch_that_cannot_work_is_told_with_the_end_of_its_log(
    tiny_model: Path, tmp_path: Path
):
    settings = rollout(
        f"http://127.0.0.1:{free_port()}",
        launch="bash -c 'echo out of memory, say; exit 7'",
        gone_timeout_s=60.0,
    )
    begin = time.monotonic()
    with pytest.raises(RolloutError, match="(?s)no usable server.*7.*out of memory, say"):
        engine_of(settings, tiny_model, tmp_path)
    assert time.monotonic() - begin < 30


def test_seeds_do_not_depend_on_the_company(
    tiny_model: Path, tmp_path: Path, server: RunningServer
):
    """Seeds asked for follow from (seed, row, sample, epoch), and differ between samples."""
    with closing(engine_of(rollout(server.url), tiny_model, tmp_path)) as engine:
        everything = engine._requests(PROMPTS, 3, LONG, 9)
        alone = engine._requests(PROMPTS[2:3], 3, LONG, 9)
    assert [r.seed for r in everything[6:9]] == [r.seed for r in alone]
    assert len({r.seed for r in everything}) == len(everything)
    assert len({r.rid for r in everything + alone}) == len(everything) + 3
    assert jax.numpy.iinfo("int32").max >= max(r.seed for r in everything) > 0
