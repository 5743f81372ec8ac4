"""SIGTERM and Ctrl-C: asked once, the run saves its last finished iteration; twice, it ends now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl.processes import Peers

__all__ = ["StopRequested", "StopSignal"]


class StopRequested(BaseException):  # noqa: N818  nothing failed
    """Raised after a signal, between two phases or in a long wait; what is unfinished is dropped.

    Like KeyboardInterrupt it is no `Exception`: code that turns failures into messages lets it
    through.
    """


class StopSignal:
    """Context manager that turns SIGTERM and SIGINT into a flag the loop polls.

    Of several processes any may get the signal: at each check they ask each other, and all stop.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        """Nothing is caught before the context is entered."""
        self._peers = peers if peers is not None and peers.count > 1 else None
        self.requested: str | None = None
        self._at_once = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        """Catch the signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        if self._at_once and self._peers is None:
            raise StopRequested(self.requested)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal ends the wait it finds the main thread in: for servers, for rewards.

        One of several processes may not leave the others' exchanges alone: it stops at the end.
        """
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raise StopRequested if a signal has come, to any process."""
        found = [self.requested]
        if self._peers is not None:
            found = self._peers.exchange("whether to stop", self.requested)
        for requested in filter(None, found):
            raise StopRequested(requested)
