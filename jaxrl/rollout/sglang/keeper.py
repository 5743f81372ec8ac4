"""Stands between the trainer and one server, and ends the server when the trainer is gone.

It is started as a file, `keeper.py LIFELINE COMMAND...`, in a fresh interpreter and with the
standard library alone. LIFELINE is the reading end of a pipe that nobody writes to: it ends when
the trainer closes it, exits, crashes or is killed. The command runs in a process group of its own,
all of which is ended then; it is ended as well when the command itself has ended, so that nothing
keeps a port or an accelerator. The keeper's exit code is the command's, 128 + N after signal N.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

__all__: list[str] = []

_POLITE_S = 5.0
"""Seconds between SIGTERM and SIGKILL: a server with an open connection can ignore the first."""
_LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


class _Told(Exception):
    """SIGTERM or SIGINT came to the keeper itself."""


def _main(lifeline: int, command: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _tell)
    libc = ctypes.CDLL(None)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,  # the lifeline, too: the server has no use for it
            # Should the keeper be killed, the server at least does not outlive it.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        while server.poll() is None:
            if select.select([lifeline], [], [], _LOOK_S)[0]:
                break
    except _Told:
        pass
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _end(server)
    code = server.wait()
    return code if code >= 0 else 128 - code


def _tell(number: int, frame: FrameType | None) -> None:
    raise _Told


def _end(server: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the server's process group.

    The leader is asked first: SGLang's ends its own helpers, and takes it for a crash if they end
    by themselves.
    """
    deadline = time.monotonic() + _POLITE_S
    server.terminate()
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    left = _send(server, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left = _send(server, 0)
    if left:
        _send(server, signal.SIGKILL)


def _send(server: subprocess.Popen[bytes], number: int) -> bool:
    """Whether there was anybody to send it to."""
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2:]))
