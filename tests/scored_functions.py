"""A module of reward functions, good and bad, and a scorer that calls them in its worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl.config import RewardConfig, RewardFunctionConfig
from jaxrl.scoring import Scorer, Scores
from jaxrl.types import Prompt

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


@contextmanager
def reward_modules(folder: Path) -> Iterator[None]:
    """`my_rewards` with the functions, and `broken_rewards`, importable as long as this lasts."""
    (folder / "my_rewards.py").write_text(FUNCTIONS)
    (folder / "broken_rewards.py").write_text("import no_such_package\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
