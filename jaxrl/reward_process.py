"""This side of the process that runs reward functions: start, ask with a time limit, end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from jaxrl.errors import RewardError

__all__ = ["RewardProcess"]

_PROGRAM = Path(__file__).with_name("reward_worker.py")


class RewardProcess:
    """The process and the two pipes to it."""

    def __init__(self) -> None:
        """Start it."""
        self._connection, commands = Pipe()
        lifeline, self._lifeline = Pipe(duplex=False)
        ends = (commands.fileno(), lifeline.fileno())
        self._process = subprocess.Popen(
            # -P: the package's folder must not be searched, its types.py would hide Python's.
            [sys.executable, "-P", str(_PROGRAM), *map(str, ends)],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the trainer; a timeout ends whatever the functions have started as well.
            start_new_session=True,
            # The accelerator is the trainer's.
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        commands.close()
        lifeline.close()

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """How it ended, a negative number for a signal; None if it closed its pipe and lives on."""
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return None

    def ask(self, request: Any, seconds: float) -> tuple[Any, ...]:
        """Send `request` unless it is None, and wait for one answer.

        Raises:
            TimeoutError: None came in `seconds`.
            EOFError, OSError: The process has died.
            RewardError: The request cannot be pickled, or not be read on the other side.
        """
        if request is not None:
            try:
                self._connection.send(request)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RewardError(f"the columns cannot be sent to the worker: {error}") from error
        if not self._connection.poll(seconds):
            raise TimeoutError
        answer = self._connection.recv()
        if answer[0] == "unreadable":
            raise RewardError(f"the columns cannot be read in the worker: {answer[1]}")
        return answer

    def kill(self) -> None:
        """End it and everything it has started."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._lifeline.close()
