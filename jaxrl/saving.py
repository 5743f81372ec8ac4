"""Which finished iterations are saved: those that are due, and those that beat all before them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.checkpoint.measured import Measured
from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.config_io import config_to_dict
from jaxrl.errors import ConfigError
from jaxrl.metrics import WALL_CLOCK
from jaxrl.progress import Progress
from jaxrl.rollouts import is_due
from jaxrl.setup import Run
from jaxrl.types import TrainState

__all__ = ["Saver"]


class Saver:
    """Saves a run's iterations; knows the best one so far, from before a stop too."""

    def __init__(self, run: Run, store: CheckpointStore, progress: Progress, first: int) -> None:
        """Look up the best in `store`; the run goes on from iteration `first`.

        What lies behind `first` is of a future that comes anew: a save that turned out damaged.
        """
        self._run, self._store, self._progress = run, store, progress
        self._settings = run.config.checkpoint
        known = store.best(up_to=first)
        self._best = known[1] if known else None
        self._seen = self._settings.best is None

    def finished(
        self, state: TrainState, cursor: Mapping[str, int], metrics: Mapping[str, float]
    ) -> None:
        """Save this iteration if it is due or the best; blocks until the arrays are safe.

        Raises:
            CheckpointError: it, or the one before, could not be written.
            ConfigError: nothing measures `checkpoint.best`.
        """
        self.check(metrics)
        done, measured = int(state.iteration), self._measured(metrics)
        best = measured is not None and measured.beats(self._best)
        if best or is_due(self._settings.every, done, self._run.config.iterations):
            with self._progress.phase("checkpoint"):
                self._save(state, cursor, measured)

    def last(
        self, state: TrainState, cursor: Mapping[str, int], metrics: Mapping[str, float]
    ) -> bool:
        """Save the last finished iteration unless it is; False if an update took its arrays."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return False
        newest = self._run.peers.exchange("newest checkpoint", self._store.latest())[0]
        if newest != int(state.iteration):
            self._save(state, cursor, self._measured(metrics))
        return True

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse a `checkpoint.best` that this evaluation or iteration should have measured.

        Raises:
            ConfigError: names it and what there is.
        """
        name = self._settings.best
        if self._seen or name is None:
            return
        held_out = name.startswith("eval/")
        there = [n for n in metrics if n.startswith("eval/")] if held_out else list(metrics)
        if not there or not (held_out or metrics.get("policy/tokens")):
            return  # nothing was evaluated, or trained on: others may measure it
        if name not in there and f"{name}_invalid" not in there:
            there = sorted(n for n in there if not n.startswith(WALL_CLOCK))
            near = difflib.get_close_matches(name, there, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"checkpoint.best={name} is not measured in this run; {hint}There are: "
                + ", ".join(there)
            )
        self._seen = True

    def _save(
        self, state: TrainState, cursor: Mapping[str, int], measured: Measured | None
    ) -> None:
        host: dict[str, Any] = {"cursor": cursor, "config": config_to_dict(self._run.config)}
        if measured is not None and measured.beats(self._best):
            self._best = measured
        self._store.save(int(state.iteration), state, host, measured)

    def _measured(self, metrics: Mapping[str, float]) -> Measured | None:
        """The value of `checkpoint.best`, the same on every process."""
        if self._settings.best is None:
            return None
        value = metrics.get(self._settings.best)
        found = Measured.of(self._settings.best, self._settings.best_mode, value)
        return self._run.peers.exchange("value of checkpoint.best", found)[0]
