"""An event loop in a thread of its own, for callers that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["LoopThread", "StuckError"]

T = TypeVar("T")


class StuckError(Exception):
    """A coroutine blocks the event loop instead of awaiting."""


class LoopThread:
    """Runs coroutines to their end; several threads may ask at once."""

    def __init__(self, name: str) -> None:
        """Start the loop."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, stuck_s: float | None = None) -> T:
        """The result of `work`. An exception that ends the waiting, Ctrl-C say, ends `work` too.

        Raises:
            StuckError: something in the loop has let nothing else run for `stuck_s` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], stuck_s).done:
                if not self._turns(stuck_s):
                    raise StuckError
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except BaseException:
            future.cancel()
            raise

    def _turns(self, seconds: float | None) -> bool:
        """Whether the loop comes round in this time."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(seconds)

    def close(self, seconds: float = 30.0) -> None:
        """Cancel what still runs and end the thread; idempotent.

        Raises:
            TimeoutError: something does not let itself be cancelled in this time.
        """
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
