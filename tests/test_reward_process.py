"""The real worker process of reward functions: how they fail, hang, crash and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.errors import RewardError
from jaxrl.function_rewards import FunctionRewards
from jaxrl.reward_process import RewardProcess
from tests.scored_functions import reward_modules, run, scorer


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with reward_modules(tmp_path_factory.mktemp("rewards")):
        yield


def test_an_exception_shows_traceback_function_and_prompt_and_is_no_score() -> None:
    with scorer("raiser") as s:
        with pytest.raises(RewardError) as caught:
            run(s, "a", "bb", "ccc", "d")
        message = str(caught.value)
        assert "my_rewards:raiser" in message and "ValueError: no c please" in message
        assert "in raiser" in message and "reward_worker" not in message
        assert "completion 2, row 12, prompt 'ppp'" in message
        assert run(s, "a").values == [0.0]  # the worker goes on


def test_leaving_is_an_exception_too() -> None:
    with scorer("leaver") as s, pytest.raises(RewardError, match="SystemExit: 3"):
        run(s, "a")


def test_functions_may_use_signal_alarm() -> None:
    with scorer("alarm") as s:
        assert run(s, "a").values == [1.0]


def test_a_hanging_function_is_ended_with_its_children_and_the_next_call_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("SCORING_TEST_FILE", str(file))
    with scorer("sleeper", timeout_s=1.5) as s:
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"my_rewards:sleeper took longer than 1.5 s"):
            run(s, "sleep")
        assert time.monotonic() - began < 10
        _wait_until_gone(int(file.read_text()))
        assert run(s, "a").values == [1.0]


def test_a_crashing_worker_is_reported_and_replaced() -> None:
    with scorer("crasher") as s:
        with pytest.raises(RewardError, match="died with exit code 7 in my_rewards:crasher"):
            run(s, "crash")
        assert run(s, "a").values == [1.0]


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not yet seen"])
def test_a_worker_killed_between_calls_is_replaced(
    seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scorer("process") as s:
        pid = int(run(s, "a").values[0])
        os.kill(pid, signal.SIGKILL)
        _wait_until_gone(pid)
        if not seen:  # a process whose threads are still ending counts as running
            states = iter([True])
            alive = RewardProcess.alive
            monkeypatch.setattr(
                RewardProcess, "alive", lambda worker: next(states, None) or alive(worker)
            )
        assert int(run(s, "a").values[0]) != pid


def test_the_worker_is_one_other_process_without_jax_and_without_the_accelerator() -> None:
    with scorer("process", "jaxrl.reward_functions:exact_match", process=1.0) as s:
        first, second = (
            run(s, "a", "b", "c", columns={"answer": "x"}).per_function["my_rewards:process"]
            for _ in range(2)
        )
    assert first[0] == second[0] != os.getpid()
    assert first[1] == 0 and first[2] == 1


def test_built_in_functions_work_by_name() -> None:
    with scorer("jaxrl.reward_functions:last_number") as s:
        scores = run(s, "it is 12.", "13", columns={"answer": 12})
    np.testing.assert_array_equal(scores.values, [1, 0])


def test_a_function_cannot_change_what_the_next_one_sees() -> None:
    with scorer("mutator", "eater", "steps", "length") as s:
        scores = run(s, "a", "bb")
    np.testing.assert_array_equal(scores.values, [3.5, 6])


def test_several_threads_may_score_at_once() -> None:
    texts = [tuple("x" * (i + j) for j in range(1, 4)) for i in range(8)]
    with scorer("length", "steps") as s, ThreadPoolExecutor(4) as threads:
        for given, scores in zip(texts, threads.map(lambda t: run(s, *t), texts), strict=True):
            expected = [len(text) + (0.5 if len(text) == 1 else 0.0) for text in given]
            assert scores.values.tolist() == expected


def test_closing_while_a_batch_is_handed_over_starts_no_other_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a thread that closes at that moment: unlike a death, it is no reason to begin again."""
    with scorer("process") as s:
        run(s, "a")
        (functions,) = s._sources
        assert isinstance(functions, FunctionRewards)
        ask, asked = RewardProcess.ask, []

        def closed_meanwhile(worker: RewardProcess, request: Any, seconds: float) -> Any:
            asked.append(request[0])
            functions.close()
            return ask(worker, request, seconds)

        monkeypatch.setattr(RewardProcess, "ask", closed_meanwhile)
        with pytest.raises(RewardError, match="died"):
            run(s, "a")
        assert asked == ["batch"] and functions._worker is None


def test_closing_ends_a_score_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    monkeypatch.setenv("SCORING_TEST_FILE", str(file))
    with ThreadPoolExecutor(1) as threads:
        s = scorer("waiter", timeout_s=50.0)
        asked = threads.submit(run, s, "a")
        while not (file.exists() and file.read_text()):
            time.sleep(0.05)
        began = time.monotonic()
        s.close()
        with pytest.raises(RewardError, match="died"):
            asked.result()
        assert time.monotonic() - began < 10


def test_the_worker_ends_with_a_parent_that_is_killed_even_in_a_call(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, signal, threading, time
        from pathlib import Path
        from jaxrl.config import RewardConfig, RewardFunctionConfig
        from jaxrl.scoring import Scorer
        from jaxrl.types import Prompt
        def die_in_the_call():
            while not (file.exists() and file.read_text()):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        file = Path(os.environ["SCORING_TEST_FILE"])
        threading.Thread(target=die_in_the_call, daemon=True).start()
        functions = [RewardFunctionConfig(fn="my_rewards:waiter")]
        scorer = Scorer(RewardConfig(functions, timeout_s=50.0))
        scorer.score([Prompt(row=0, ids=(1,), text="p", columns={})], ["a"], [[1]])
        """
    )
    file = tmp_path / "pid"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SCORING_TEST_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", program], env=env)
    assert done.returncode == -signal.SIGKILL
    _wait_until_gone(int(file.read_text()))


def _wait_until_gone(pid: int) -> None:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return  # dead, its parent has not asked yet
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")
