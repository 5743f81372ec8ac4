"""The real worker process: what functions return, how they fail, hang, crash and end."""

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

import numpy as np
import pytest

from jaxrl.config import RewardConfig, RewardFunctionConfig
from jaxrl.errors import RewardError
from jaxrl.reward_process import RewardProcess
from jaxrl.scoring import Scorer, Scores, total_scores
from jaxrl.types import Prompt, Trajectory

FUNCTIONS = """
import math, os, signal, subprocess, sys, time
import numpy as np

def length(*, completions, **_): return [len(text) for text in completions]
def column(*, prompts, completion_ids, gain, **_):
    rows = zip(prompts, completion_ids, gain)
    return [len(p) + 10 * len(ids) + 100 * (g or 0) for p, ids, g in rows]
def kinds(**_): return [1, True, np.float32(.5), np.array(2)]
def array(*, completions, **_): return np.arange(len(completions), dtype=np.int32)
def text(*, completions, **_): return [1.0] * (len(completions) - 1) + ["1"]
def one(**_): return [1.0]
def three(**_): return [1.0] * 3
def five(**_): return [1.0] * 5
def scalar(**_): return 1.0
def mapping(**_): return {0: 1., 1: 1., 2: 1., 3: 1.}
def string(**_): return "1111"
def nothing(**_): return None
def short(*, completion_ids, **_):
    return [0.0] + [[1.0] * (len(ids) - 1) for ids in completion_ids[1:]]
def table(*, completions, **_): return np.zeros((len(completions), 1, 1))
def text_token(**_): return [[1.0, "x"]]
def steps(*, completion_ids, **_):
    return [0.5 if len(ids) == 1 else [float(t) for t in range(len(ids))] for ids in completion_ids]
def array_steps(*, completion_ids, **_):
    return [np.arange(len(ids), dtype=np.float32) for ids in completion_ids]
def gaps(*, completion_ids, **_): return [[1.0, None], [1.0, math.inf], 3.0, [1.0, 2.0]]
def huge_steps(*, completion_ids, **_): return [[1e38] * len(ids) for ids in completion_ids]
def eater(*, completion_ids, **_):
    result = [len(ids) for ids in completion_ids]
    for ids in completion_ids: ids.clear()
    return result
def bad(*, completions, **_): return [1.0, None, math.nan, math.inf][:len(completions)]
def huge(*, completions, **_): return [1e300] * len(completions)
def raiser(*, completions, **_):
    for text in completions:
        if text == "ccc": raise ValueError("no c please")
    return [0.0] * len(completions)
def leaver(**_): sys.exit(3)
def alarm(*, completions, **_):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(2)
    signal.alarm(0)
    return [1.0] * len(completions)
def sleeper(*, completions, **_):
    if completions[0] == "sleep":
        child = subprocess.Popen(["sleep", "60"])
        open(os.environ["SCORING_TEST_FILE"], "w").write(str(child.pid))
        time.sleep(60)
    return [1.0] * len(completions)
def waiter(**_):
    with open(os.environ["SCORING_TEST_FILE"], "w") as file: file.write(str(os.getpid()))
    time.sleep(60)
def crasher(*, completions, **_):
    if completions[0] == "crash": os._exit(7)
    return [1.0] * len(completions)
def process(*, completions, **_):
    modules = ("jax" in sys.modules) + 2 * ("jaxrl" in sys.modules)
    return [os.getpid(), modules, os.environ["JAX_PLATFORMS"] == "cpu"][:len(completions)]
def mutator(*, completions, **_):
    result = [float(len(t)) for t in completions]
    completions.clear()
    return result
not_callable = 3
"""


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    (folder / "broken_rewards.py").write_text("import no_such_package\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def scorer(
    *names: str, timeout_s: float = 20.0, on_invalid: str = "error", **weights: float
) -> Scorer:
    functions = [
        RewardFunctionConfig(fn=n if ":" in n else f"my_rewards:{n}", weight=weights.get(n, 1.0))
        for n in names
    ]
    return Scorer(RewardConfig(functions, timeout_s=timeout_s, on_invalid=on_invalid))  # type: ignore[arg-type]


def run(scorer: Scorer, *completions: str, columns: dict[str, object] | None = None) -> Scores:
    prompts = [
        Prompt(row=10 + i, ids=(1,), text="p" * (i + 1), columns=columns or {})
        for i in range(len(completions))
    ]
    return scorer.score(prompts, completions, [[7] * len(text) for text in completions])


def test_scores_are_weighted_sums_in_float32() -> None:
    with scorer("length", "array", length=0.5, array=-2.0) as s:
        scores = run(s, "a", "bb", "ccc", "")
    assert scores.values.dtype == np.float32 and scores.valid.dtype == bool
    np.testing.assert_array_equal(scores.values, [0.5, 1 - 2, 1.5 - 4, -6])
    assert scores.valid.all()
    np.testing.assert_array_equal(scores.per_function["my_rewards:length"], [1, 2, 3, 0])
    np.testing.assert_array_equal(scores.per_function["my_rewards:array"], [0, 1, 2, 3])


def test_arguments_are_lists_with_an_entry_a_completion_and_gaps_are_none() -> None:
    prompts = [
        Prompt(row=0, ids=(1,), text="pp", columns={"gain": 3}),
        Prompt(row=1, ids=(1,), text="p", columns={"other": 1}),
    ]
    with scorer("column") as s:
        scores = s.score(prompts, ["x", "y"], [(5, 6), (5,)])
    np.testing.assert_array_equal(scores.values, [2 + 20 + 300, 1 + 10 + 0])


def test_number_types_are_taken_and_strings_are_not() -> None:
    with scorer("kinds") as s:
        np.testing.assert_array_equal(run(s, "a", "b", "c", "d").values, [1, 1, 0.5, 2])
    with (
        scorer("text") as s,
        pytest.raises(RewardError, match=r"my_rewards:text .*'1' \(str\).* 3"),
    ):
        run(s, "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("one", "1 values"),
        ("three", "3 values"),
        ("five", "5 values"),
        ("scalar", "one float"),
        ("mapping", "a dict"),
        ("string", "a str"),
        ("nothing", "one NoneType"),
    ],
)
def test_the_wrong_number_of_values_is_refused(name: str, given: str) -> None:
    with (
        scorer(name) as s,
        pytest.raises(RewardError, match=f"{name} returned {given} for 4 compl"),
    ):
        run(s, "a", "b", "c", "d")


@pytest.mark.parametrize(
    ("name", "completions", "message"),
    [
        ("short", ("a", "bb"), "short returned 1 numbers for the 2 tokens of completion 1"),
        ("table", ("a",), r"table returned .* \(ndarray\) for completion 0"),
        ("text_token", ("ab",), r"'x' \(str\) for token 1 of completion 0"),
    ],
)
def test_lists_have_a_number_a_token(name: str, completions: tuple[str, ...], message: str) -> None:
    with scorer(name) as s, pytest.raises(RewardError, match=message):
        run(s, *completions)


def test_rewards_of_tokens_are_kept_apart_from_the_score_and_weighted_alike() -> None:
    with scorer("steps", "length", "array_steps", steps=2.0, length=0.5, array_steps=-10.0) as s:
        scores = run(s, "a", "bb", "ccc")
    # steps: 0.5, [0, 1], [0, 1, 2]; array_steps: [0], [0, 1], [0, 1, 2]
    np.testing.assert_array_equal(scores.values, [2 * 0.5 + 0.5, 1.0, 1.5])
    assert [None if t is None else t.tolist() for t in scores.tokens] == [
        [0],
        [0, -8],
        [0, -8, -16],
    ]
    assert all(t is None or t.dtype == np.float32 for t in scores.tokens)
    np.testing.assert_array_equal(scores.per_function["my_rewards:steps"], [0.5, 1, 3])
    with scorer("steps") as s:
        first, second = run(s, "a", "bb").tokens
        assert first is None and second is not None and second.tolist() == [0, 1]
        assert run(s, "a").tokens == ()  # none has any


def test_a_token_without_a_finite_reward_makes_the_completion_invalid() -> None:
    with scorer("gaps", "length", on_invalid="drop") as s:
        scores = run(s, "aa", "bb", "cc", "dd")
    assert scores.valid.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(scores.values, [0, 0, 5, 2])
    assert [t is None for t in scores.tokens] == [True, True, True, False]
    np.testing.assert_array_equal(scores.per_function["my_rewards:gaps"], [np.nan, np.nan, 3, 3])
    with (
        scorer("gaps") as s,
        pytest.raises(RewardError, match="None for token 1 of completion 0, row 10.*2 of 4"),
    ):
        run(s, "aa", "bb", "cc", "dd")


def test_an_invalid_completion_has_no_token_rewards() -> None:
    with scorer("bad", "array_steps", on_invalid="drop") as s:
        scores = run(s, "a", "b", "c", "d")
    assert scores.valid.tolist() == [True, False, False, False]
    assert [t is None for t in scores.tokens] == [False, True, True, True]


def test_weighted_token_rewards_beyond_float32_are_invalid() -> None:
    with scorer("huge_steps", on_invalid="drop", huge_steps=10.0) as s:
        scores = run(s, "aa")
        assert not scores.valid.any() and scores.tokens == ()
    with (
        scorer("huge_steps", huge_steps=10.0) as s,
        pytest.raises(RewardError, match=r"weighted sum .* of tokens returned 1e\+39 for token 0"),
    ):
        run(s, "aa")


def test_a_trajectory_is_worth_all_its_rewards() -> None:
    def trajectory(*rewards: float) -> Trajectory:
        prompt = Prompt(row=0, ids=(1,), text="p", columns={})
        return Trajectory(
            prompt=prompt,
            sample=0,
            response_ids=(5, 6),
            logprobs=(0.0, 0.0),
            finish_reason="stop",
            rewards=rewards,
        )

    scores = Scores(
        np.array([1.0, 2.0], np.float32),
        np.ones(2, bool),
        {},
        (None, np.array([10.0, 20.0], np.float32)),
    )
    totals = total_scores([trajectory(), trajectory(0.5, 0.25)], scores)
    assert totals.tolist() == [1.0, 32.75]


def test_invalid_values_stop_the_run_and_name_the_prompt() -> None:
    with scorer("length", "bad") as s:
        with pytest.raises(
            RewardError, match=r"bad returned None for completion 1, row 11, prompt 'pp'"
        ):
            run(s, "a", "b", "c", "d")
        with pytest.raises(RewardError, match=r"3 of 4 completions.*reward.on_invalid=drop"):
            run(s, "a", "b", "c", "d")


def test_invalid_values_are_dropped_when_asked() -> None:
    with scorer("length", "bad", on_invalid="drop") as s:
        scores = run(s, "a", "b", "c", "d")
    np.testing.assert_array_equal(scores.valid, [True, False, False, False])
    np.testing.assert_array_equal(scores.values, [2, 0, 0, 0])
    np.testing.assert_array_equal(
        scores.per_function["my_rewards:bad"], [1, np.nan, np.nan, np.nan]
    )
    np.testing.assert_array_equal(scores.per_function["my_rewards:length"], [1, 1, 1, 1])


def test_a_score_beyond_float32_is_invalid() -> None:
    with scorer("huge", on_invalid="drop") as s:
        assert not run(s, "a").valid.any()
    with scorer("huge") as s, pytest.raises(RewardError, match=r"huge returned 1e\+300"):
        run(s, "a")
    with (
        scorer("length", length=1e39) as s,
        pytest.raises(RewardError, match=r"weighted sum .* 1e\+39"),
    ):
        run(s, "a")


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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module_here:f", "No module named"),
        ("my_rewards:missing", "has nothing called missing"),
        ("my_rewards:not_callable", "is int, not a function"),
        ("broken_rewards:f", "no_such_package"),
        ("my_rewards:", "module:function"),
    ],
)
def test_functions_are_found_at_the_start_or_not_at_all(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=rf"reward.functions\[1\].fn='{name}'.*{reason}"):
        scorer("length", name)


def test_a_module_may_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text("def f(*, completions, **_): return [4.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with scorer("rewards_here:f") as s:
        assert run(s, "a").values == [4.0]


def test_probe_finds_faults_before_the_first_rollout() -> None:
    prompts = [Prompt(row=i, ids=(1,), text="p", columns={}) for i in range(3)]
    with scorer("column") as s, pytest.raises(RewardError, match="TypeError.*gain"):
        s.probe(prompts)
    with scorer("five") as s, pytest.raises(RewardError, match="5 values for 2 completions"):
        s.probe(prompts)
    with scorer("bad") as s:
        s.probe(prompts)  # None is a matter for reward.on_invalid
        with pytest.raises(RewardError):
            run(s, "a", "b")


def test_columns_that_cannot_be_sent_are_named() -> None:
    with scorer("length") as s, pytest.raises(RewardError, match="columns cannot be sent"):
        run(s, "a", columns={"f": lambda: None})


def test_unequal_arguments_are_refused() -> None:
    with scorer("length") as s, pytest.raises(ValueError, match="equally many"):
        s.score([], ["a"], [[1]])


def test_without_any_source_every_score_is_a_valid_zero() -> None:
    with scorer() as s:
        scores = run(s, "a", "b")
        s.probe([])
    assert scores.values.tolist() == [0, 0] and scores.valid.all()
    assert scores.per_function == {} and scores.tokens == ()


def test_several_threads_may_score_at_once() -> None:
    texts = [tuple("x" * (i + j) for j in range(1, 4)) for i in range(8)]
    with scorer("length", "steps") as s, ThreadPoolExecutor(4) as threads:
        for given, scores in zip(texts, threads.map(lambda t: run(s, *t), texts), strict=True):
            expected = [len(text) + (0.5 if len(text) == 1 else 0.0) for text in given]
            assert scores.values.tolist() == expected


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


def test_no_completions_give_no_scores() -> None:
    with scorer("one") as s:
        scores = run(s)
    assert scores.values.shape == scores.valid.shape == (0,)
    assert scores.per_function["my_rewards:one"].shape == (0,)


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
