"""Others that are told a run's metrics, each kept from harming the run.

A tracker works in a thread of its own behind a queue. One that raises, cannot start, or blocks is
given up with one warning, and the run and its own record go on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["GuardedTracker", "TensorBoard", "Tracker"]

QUEUE_LENGTH = 1000
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What is told the metrics of each step; it may fail as it likes."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Event files, one scalar a metric."""

    def __init__(self, folder: Path, last_step: int) -> None:
        """Write to `folder`; what an earlier process wrote there after `last_step` is hidden."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        self._writer.close()


class GuardedTracker:
    """A tracker in a thread of its own: started, fed and closed there, given up when it fails."""

    def __init__(self, start: Callable[[], Tracker]) -> None:
        """Begin to start it; returns at once."""
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None]
        self._queue = queue.Queue(QUEUE_LENGTH)
        self._lock = threading.Lock()
        self._failed = False
        # A daemon: one that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the metrics of a step; never waits."""
        self._put((step, values))

    def close(self, seconds: float = 5.0) -> None:
        """Let it finish for at most `seconds`."""
        self._put(None)
        if not self._failed:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._give_up(f"it did not finish within {seconds:g} s")

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        if not self._failed:
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                self._give_up(f"it is {QUEUE_LENGTH} steps behind")

    def _run(self, start: Callable[[], Tracker]) -> None:
        try:
            tracker = start()
            while (item := self._queue.get()) is not None:
                tracker.write(*item)
            tracker.close()
        except BaseException as error:  # a tracker may even call sys.exit
            self._give_up(repr(error))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            known, self._failed = self._failed, True
        if not known:
            log.warning("a tracker of metrics is given up: %s; metrics.jsonl goes on", reason)
