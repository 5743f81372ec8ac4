"""SIGTERM and Ctrl-C: asked once, the run saves its last finished iteration; twice, it ends now."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequested", "StopSignal"]


class StopRequested(BaseException):  # noqa: N818  nothing failed
    """Raised after a signal, between two phases or in a long wait; what is unfinished is dropped.

    Like KeyboardInterrupt it is no `Exception`: code that turns failures into messages lets it
    through.
    """


class StopSignal:
    """Context manager that turns SIGTERM and SIGINT into a flag the loop polls."""

    def __init__(self) -> None:
        """Nothing is caught before the context is entered."""
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
        if self._at_once:
            raise StopRequested(self.requested)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal ends the wait it finds the main thread in: for servers, for rewards."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raise StopRequested if a signal has come."""
        if self.requested:
            raise StopRequested(self.requested)
