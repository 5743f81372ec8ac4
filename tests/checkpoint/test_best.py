"""The best checkpoint by a metric: which one it is, and that it is never pruned."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from jaxrl.checkpoint.measured import Measured
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.errors import CheckpointError
from tests.checkpoint.states import numbered_state


def scored(value: float | None, mode: str = "max", metric: str = "eval/score") -> Measured | None:
    return Measured.of(metric, mode, value)


def save_all(
    store: CheckpointStore, scores: Sequence[float | None], mode: str = "max", first: int = 1
) -> None:
    for step, value in enumerate(scores, first):
        store.save(step, numbered_state(step), {}, scored(value, mode))
    store.wait()


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nothing_to_be_kept_for(value: float | None) -> None:
    assert scored(value) is None


def test_better_is_strictly_better_and_of_the_same_metric() -> None:
    one = Measured("eval/score", "max", 0.5)
    assert one.beats(None)
    assert one.beats(Measured("eval/score", "max", 0.4))
    assert not one.beats(Measured("eval/score", "max", 0.5))
    assert not one.beats(Measured("eval/score", "max", 0.6))
    smaller = Measured("eval/score", "min", 0.5)
    assert smaller.beats(Measured("eval/score", "min", 0.6))
    assert not smaller.beats(Measured("eval/score", "min", 0.4))
    # Of another metric, or judged the other way round: no competitor.
    assert one.beats(Measured("reward/mean", "max", 0.9)) and one.beats(smaller)


@pytest.mark.parametrize(
    ("mode", "scores", "best", "kept"),
    [
        ("max", [0.1, 0.7, 0.3, 0.2, 0.6], 2, [2, 4, 5]),
        ("min", [0.5, 0.7, 0.3, 0.2, 0.6], 4, [4, 5]),
        ("max", [0.1, 0.2, 0.3, 0.4, 0.5], 5, [4, 5]),
        ("max", [0.4, 0.4, 0.3, 0.4, 0.4], 1, [1, 4, 5]),  # equal ones: the first
        ("max", [0.4, None, 0.5, None, math.nan], 3, [3, 4, 5]),  # not each has a value
    ],
)
def test_the_best_stays_beside_the_newest(
    store: CheckpointStore, mode: str, scores: list[float | None], best: int, kept: list[int]
) -> None:
    save_all(store, scores, mode)
    known = store.best()
    assert known is not None and (known[0], known[1].value) == (best, scores[best - 1])
    assert store.steps() == kept and store.latest() == 5
    assert (store.find("best"), store.find("latest"), store.find("4")) == (best, 5, 4)
    assert store.restore(best, numbered_state(0))[0].iteration == best


def test_another_process_finds_the_best_and_goes_on_with_it(store: CheckpointStore) -> None:
    save_all(store, [0.1, 0.7, 0.3, 0.2])
    later = CheckpointStore(store.folder, keep=2)
    known = later.best()
    assert known == (2, Measured("eval/score", "max", 0.7))
    save_all(later, [0.5, 0.9, 0.8], first=5)
    assert later.steps() == [6, 7] and later.find("best") == 6  # 2 is beaten, and gone
    assert later.best(up_to=5) is None
    later.close()


def test_with_another_metric_the_best_of_the_old_one_goes(store: CheckpointStore) -> None:
    save_all(store, [0.9, 0.1, 0.2])
    for step in (4, 5, 6):
        store.save(step, numbered_state(step), {}, scored(1.0 * step, "min", "policy/loss"))
    store.wait()
    assert store.best() == (4, Measured("policy/loss", "min", 4.0))
    assert store.steps() == [4, 5, 6]


def test_a_step_that_is_saved_again_counts_as_it_is_now(store: CheckpointStore) -> None:
    save_all(store, [0.1, 0.7, 0.3])
    store.save(2, numbered_state(2), {}, scored(0.2))
    store.wait()
    assert store.find("best") == 3 and store.steps() == [3, 2]


def test_a_best_that_is_damaged_is_not_the_best(store: CheckpointStore) -> None:
    save_all(store, [0.9, 0.1, 0.2])
    (store.folder / "00000001" / "host.json").unlink()
    assert store.find("best") == 3


@pytest.mark.parametrize(
    "kept", ["x", {"metric": "m"}, {"metric": "m", "mode": "max", "value": "high"}]
)
def test_a_manifest_that_says_nonsense_of_it_says_nothing(
    store: CheckpointStore, kept: object
) -> None:
    save_all(store, [0.5])
    path = store.folder / "00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "measured": kept}))
    assert store.best() is None and store.latest() == 1


def test_what_names_none_says_what_there_is(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        store.find("best")
    save_all(store, [None, None])
    with pytest.raises(CheckpointError, match=r"none is the best.*checkpoint.best.*\[1, 2\]"):
        store.find("best")
    with pytest.raises(CheckpointError, match="'newest' names no checkpoint.*latest, best or"):
        store.find("newest")
