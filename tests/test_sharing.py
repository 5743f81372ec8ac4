"""Rollouts shared by processes: the batch that one process would have got, on every one of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxrl.dynamic_sampling import Sampled
from jaxrl.errors import RolloutError
from jaxrl.processes import ALONE, Peers
from jaxrl.rollout.engine import LeftOut
from jaxrl.scoring import Scores
from jaxrl.sharing import sample_shared
from jaxrl.types import Prompt, Trajectory


class Threads(Peers):
    """Stands for processes: threads of this one that meet at a barrier."""

    def __init__(self, index: int, count: int, meeting: threading.Barrier, table: list) -> None:
        self.index, self.count = index, count
        self._meeting, self._table = meeting, table

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._table[self.index] = (name, value)
        self._meeting.wait(10)
        names, values = zip(*self._table, strict=True)
        self._meeting.wait(10)
        assert set(names) == {name}
        return list(values)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row=i, ids=(1, 2), text="", columns={}) for i in range(count)]


class Engine:
    """Two completions a prompt, which say whose they are; remembers what it was asked."""

    def __init__(self, missing: Sequence[int] = ()) -> None:
        self.asked: list[list[int]] = []
        self.missing = missing

    def ask(self, asked: Sequence[Prompt]) -> list[Trajectory]:
        self.asked.append([p.row for p in asked])
        kept = [p for p in asked if p.row not in self.missing]
        if not kept:
            raise LeftOut("nothing came back")
        return [
            Trajectory(
                prompt=p,
                sample=sample,
                response_ids=(3, p.row),
                logprobs=(-1.0, -2.0),
                finish_reason="stop",
            )
            for p in kept
            for sample in range(2)
        ]


def score(trajectories: Sequence[Trajectory]) -> Scores:
    values = np.array([10 * t.prompt.row + t.sample for t in trajectories], np.float32)
    return Scores(values, np.ones(len(values), bool), {"f": values * 2})


def on(count: int, engines: list[Engine], asked: int, *, collective: bool) -> list[Sampled]:
    """What each of `count` processes gets."""
    meeting, table = threading.Barrier(count), [None] * count

    def one(index: int) -> Sampled:
        peers = Threads(index, count, meeting, table)
        given = sample_shared(
            peers, "batch", prompts(asked), engines[index].ask, score, collective=collective
        )
        return given[0]

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def same(a: Sampled, b: Sampled) -> None:
    assert a.prompts == b.prompts and a.trajectories == b.trajectories
    for x, y in ((a.scores.values, b.scores.values), (a.scores.valid, b.scores.valid)):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(a.scores.per_function["f"], b.scores.per_function["f"])


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("asked", [1, 5, 6])
def test_every_process_gets_the_batch_of_one(count: int, asked: int, collective: bool) -> None:
    want, _ = sample_shared(ALONE, "batch", prompts(asked), Engine().ask, score, collective=False)
    engines = [Engine() for _ in range(count)]
    for got in on(count, engines, asked, collective=collective):
        same(got, want)
    rows = [row for engine in engines for call in engine.asked for row in call]
    # A program over all devices is asked for everything by all; servers by each for its part.
    assert sorted(rows) == sorted(list(range(asked)) * (count if collective else 1))


def test_what_one_process_cannot_get_is_left_out_of_the_batch_of_all() -> None:
    engines = [Engine(), Engine(missing=range(2, 9))]
    for got in on(2, engines, 4, collective=False):
        assert [t.prompt.row for t in got.trajectories] == [0, 0, 1, 1]
        assert got.scores.values.tolist() == [0.0, 1.0, 10.0, 11.0]


def test_nothing_from_anybody_is_an_error_on_all() -> None:
    engines = [Engine(missing=range(9)), Engine(missing=range(9))]
    with pytest.raises(RolloutError, match="none of the completions"):
        on(2, engines, 4, collective=False)
