"""Servers that belong to the run: started from a command line, watched, and ended with the trainer.

One child for each URL. Each runs under `keeper.py`, so that nothing of it is left however the
trainer ends.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from jaxrl.errors import ConfigError

__all__ = ["RESTARTS", "ServerProcesses", "fill_command"]

RESTARTS = 3
"""How often a server that has ended is started again."""
_KEEPER = Path(__file__).with_name("keeper.py")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_END_S = 15.0
"""Seconds a keeper has to end its server: it needs five where the server does not listen."""
_TAIL_LINES, _TAIL_BYTES = 20, 4000


def fill_command(command: str, values: Mapping[str, object]) -> list[str]:
    """Split a command line as a shell would, and fill in `{name}` in each word.

    Other braces, those of JSON for instance, are left alone.

    Raises:
        ConfigError: the command is empty or ends within quotes, or a `{name}` is not in `values`.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"rollout.launch={command!r} cannot be split: {error}") from error
    if not words:
        raise ConfigError("rollout.launch is empty; give a command line, or null to start nothing")

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            allowed = ", ".join(f"{{{name}}}" for name in values)
            raise ConfigError(
                f"rollout.launch={command!r}: unknown placeholder {match[0]}; allowed: {allowed}"
            )
        return str(values[match[1]])

    return [_PLACEHOLDER.sub(fill, word) for word in words]


class ServerProcesses:
    """The servers of one run; use it from one thread at a time."""

    def __init__(self, command: str, urls: Sequence[str], *, model: str, log_dir: Path) -> None:
        """Prepare; nothing is started.

        Args:
            command: starts one server and stays as long as it runs. Filled in are `{host}` and
                `{port}` of its URL, `{model}`, and `{index}`, its place in `urls` from 0 on.
            urls: ``http://host:port``, one for each server.
            model: what `{model}` stands for.
            log_dir: standard output and error of server i are appended to server-i.log there.

        Raises:
            ConfigError: see `fill_command`; or a URL has no host or port, or appears twice.
        """
        self._children: dict[str, _Child] = {}
        for index, url in enumerate(urls):
            host, port = _address(url)
            values = {"host": host, "port": port, "model": model, "index": index}
            words, key = fill_command(command, values), url.rstrip("/")
            if key in self._children:
                raise ConfigError(f"rollout.urls has {url} twice; each server needs its own")
            self._children[key] = _Child(words, log_dir / f"server-{index}.log")

    def start(self) -> None:
        """Start all of them; whether they become healthy is for the caller to see."""
        try:
            for child in self._children.values():
                child.start()
        except BaseException:
            self.close()
            raise

    def dead(self) -> dict[str, str]:
        """Of each server that has ended by itself: how, and the last lines of its log."""
        return {
            url: child.obituary()
            for url, child in self._children.items()
            if child.started and not child.alive()
        }

    def revive(self, url: str) -> bool:
        """Start a server again if it has ended; False if that was done `RESTARTS` times before."""
        child = self._children[url.rstrip("/")]
        if child.alive():
            return True
        if child.restarts == RESTARTS:
            return False
        child.restarts += 1
        child.start()
        return True

    def close(self) -> None:
        """End all of them and everything they have started, and wait for that."""
        for child in self._children.values():  # all are told before any is waited for
            child.let_go()
        for child in self._children.values():
            child.wait()


class _Child:
    """One server's keeper, and the pipe that keeps it running."""

    def __init__(self, words: list[str], log: Path) -> None:
        self._words, self._log = words, log
        self._keeper: subprocess.Popen[bytes] | None = None
        self._lifeline: BinaryIO | None = None
        self._log_start = 0
        self.restarts = 0

    @property
    def started(self) -> bool:
        """Whether it was started and not let go since."""
        return self._lifeline is not None

    def alive(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    def start(self) -> None:
        self.let_go()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        self._lifeline = open(writing, "wb", buffering=0)
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._keeper = subprocess.Popen(
                    # -P: this folder must not be searched, nor the package imported.
                    [sys.executable, "-P", str(_KEEPER), str(reading), *self._words],
                    pass_fds=[reading],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the trainer
                )
        finally:
            os.close(reading)

    def let_go(self) -> None:
        """Closing the pipe makes the keeper end the server."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def wait(self) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the server dies with it
            self._keeper.wait()

    def obituary(self) -> str:
        """Exit code and the end of what it wrote since it was started."""
        assert self._keeper is not None
        code = self._keeper.wait()
        by = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").rstrip().splitlines()
        said = "\n".join(lines[-_TAIL_LINES:]) or "(nothing)"
        return f"ended with exit code {code}{by}; {self._log} ends with\n{said}"


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host = port = None
    if not host or not port:
        raise ConfigError(
            f"rollout.urls has {url!r}; a server that rollout.launch starts needs"
            " http://host:port, with the port it is to listen on"
        )
    return host, port
