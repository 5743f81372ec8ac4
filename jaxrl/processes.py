"""Several processes that train one model: who they are, what they tell each other, how all end.

Arrays travel through compiled steps, over the mesh. Everything else (trajectories, scores, requests
to stop) goes through a connection of our own between the first process and each other one, from any
thread: an exchange over devices would have to keep its order between the steps of all processes.

A process that fails says so and all end with its message; one that is killed is missed by the
connection at once.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl import errors
from jaxrl.errors import ConfigError, JaxrlError
from jaxrl.stopping import StopRequested

__all__ = ["ALONE", "Peers", "connect", "share_of"]

T = TypeVar("T")
_END = "the end"
_PARTING_S = 5.0


class Peers:
    """The processes of a run; this class by itself is a run of one."""

    index = 0
    count = 1
    _shared: BaseException | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and talks to a person."""
        return self.index == 0

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What each process gave under this name, in their order; all must ask for it.

        Names that are asked for by several threads at once must differ.
        """
        del name
        return [value]

    def together(self, name: str, work: Callable[[], T]) -> list[T]:
        """What `work` gave on each process; if it failed on one, it fails on all.

        Raises:
            JaxrlError: this process's own error, or one of the same kind with the message of the
                first process that failed.
        """
        try:
            mine: Any = work()
            told = (None, mine)
        except (JaxrlError, StopRequested) as error:
            if self.count == 1:
                raise
            mine, told = error, ((type(error).__name__, str(error)), None)
        found = self.exchange(name, told)
        for index, (failure, _) in enumerate(found):
            if failure is not None:
                own = isinstance(mine, BaseException)
                self._shared = mine if own else _same_kind(index, *failure)
                raise self._shared
        return [value for _, value in found]

    def shared(self, error: BaseException) -> bool:
        """Whether every process has this error now, so that they can do something about it."""
        return self.count == 1 or error is self._shared

    def fail(self, message: str) -> None:
        """Tell the others to end with this message, which this one does next."""

    def close(self) -> None:
        """Wait for the others to come here, then part."""


ALONE = Peers()


def share_of(items: Sequence[T], peers: Peers) -> Sequence[T]:
    """This process's part: consecutive, and of all parts none longer by more than one.

    >>> share_of([1, 2, 3], ALONE)
    [1, 2, 3]
    """
    bounds = np.linspace(0, len(items), peers.count + 1).astype(int)
    return items[bounds[peers.index] : bounds[peers.index + 1]]


def connect(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Peers:
    """Join the other processes of this run; before any device is used.

    Args:
        coordinator: host:port of the first process; None, like the others: what the cluster says
            (SLURM, TPU pods, GKE, Open MPI), as `jax.distributed.initialize` finds it.
        processes: how many.
        process: which this is, from 0.

    Raises:
        ConfigError: some of the three are given and not all, or they make no sense.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ConfigError(f"{', '.join(missing)} missing; give all of {', '.join(given)} or none")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise ConfigError(
            f"--process={process} must be in [0, {processes}) for {processes} processes"
        )
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes of this run could not be joined: {error}; check --coordinator (the "
            "address of process 0, reachable from here), --processes and --process"
        ) from error
    if jax.process_count() == 1:
        return ALONE
    host = coordinator.rsplit(":", 1)[0] if coordinator else socket.gethostname()
    return _Joined(*_meeting_point(host))


def _meeting_point(host: str) -> tuple[Listener | None, tuple[str, int], bytes]:
    """Where process 0 listens, and a key that only these processes know."""
    listener, told = None, np.zeros(512, np.uint8)
    if jax.process_index() == 0:
        key = secrets.token_bytes(32)
        listener = Listener(("", 0), backlog=jax.process_count(), authkey=key)
        text = pickle.dumps((host, listener.address[1], key))
        told[: len(text)] = np.frombuffer(text, np.uint8)
    host, port, key = pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(told)).tobytes())
    return listener, (host, port), key


class _Joined(Peers):
    """A star: process 0 collects what the others send and gives everybody all of it."""

    def __init__(self, listener: Listener | None, address: tuple[str, int], key: bytes) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._answers: dict[tuple[str, int], Future[list[Any]]] = {}
        self._collected: dict[tuple[str, int], dict[int, Any]] = {}
        self._links: dict[int, tuple[Connection, threading.Lock]] = {}
        self._parting = threading.Event()
        self._ending = threading.Lock()
        if listener is not None:
            self._accept(listener)
        else:
            link = Client(address, authkey=key)
            link.send(self.index)
            self._add(0, link)
        self.exchange("everybody is there", None)

    def _accept(self, listener: Listener) -> None:
        while len(self._links) < self.count - 1:
            link = listener.accept()
            self._add(link.recv(), link)
        listener.close()

    def _add(self, index: int, link: Any) -> None:
        _keep_alive(link)
        self._links[index] = (link, threading.Lock())
        threading.Thread(
            target=self._listen, args=(index, link), name=f"process-{index}", daemon=True
        ).start()

    def exchange(self, name: str, value: Any) -> list[Any]:
        with self._lock:
            self._asked[name] += 1
            tag = (name, self._asked[name])
            answer = self._answers.setdefault(tag, Future())
        if self.leads:
            self._collect(tag, 0, value)
        else:
            self._send(0, ("value", tag, value))
        everything = answer.result()
        with self._lock:
            del self._answers[tag]
        return everything

    def fail(self, message: str) -> None:
        message = f"process {self.index} failed: {message}"
        if self.leads:
            self.fail_here(message)
        self._tell(message)

    def close(self) -> None:
        if not self._parting.is_set():
            self.exchange(_END, None)

    def _send(self, index: int, message: tuple[str, Any, Any]) -> None:
        link, lock = self._links[index]
        with lock:
            link.send(message)

    def _collect(self, tag: tuple[str, int], index: int, value: Any) -> None:
        """Process 0: keep a value; with the last one, answer everybody."""
        with self._lock:
            values = self._collected.setdefault(tag, {})
            values[index] = value
            if len(values) < self.count:
                return
            del self._collected[tag]
            if tag[0] == _END:  # whoever is answered may leave at once
                self._parting.set()
        everything = [values[i] for i in range(self.count)]
        for other in list(self._links):
            with suppress(KeyError, OSError):  # gone: its own thread says so
                self._send(other, ("answer", tag, everything))
        self._answer(tag, everything)

    def _answer(self, tag: tuple[str, int], everything: list[Any]) -> None:
        with self._lock:
            answer = self._answers.setdefault(tag, Future())
        answer.set_result(everything)

    def _listen(self, index: int, link: Connection) -> None:
        """What comes from one process, in a thread of its own."""
        try:
            while True:
                kind, what, value = link.recv()
                if kind == "value":
                    self._collect(what, index, value)
                elif kind == "answer":
                    if what[0] == _END:
                        self._parting.set()
                    self._answer(what, value)
                else:
                    self._links.pop(index, None)
                    self.fail_here(what)
        except (EOFError, OSError):
            self._links.pop(index, None)
            if not self._parting.is_set():
                self.fail_here(
                    f"process {index} is gone without a word: killed, out of memory, or its "
                    "machine is down; its own output says more"
                )

    def fail_here(self, message: str) -> NoReturn:
        """End this process now: its main thread may wait in a step for one that never comes."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it, with the first cause
        print(f"ended: {message}", file=sys.stderr, flush=True)
        if self.leads:
            self._tell(message)
            # JAX aborts, without a message, whoever outlives process 0.
            until = time.monotonic() + _PARTING_S
            while len(self._links) > 0 and time.monotonic() < until:
                time.sleep(0.05)
        os._exit(1)

    def _tell(self, message: str) -> None:
        for index in list(self._links):
            with suppress(KeyError, OSError):  # gone already, which the others see by themselves
                self._send(index, ("end", message, None))


def _same_kind(index: int, kind: str, message: str) -> BaseException:
    """The error of another process, as it would be raised here."""
    if kind == StopRequested.__name__:
        return StopRequested(message)
    return getattr(errors, kind, JaxrlError)(f"process {index}: {message}")


def _keep_alive(link: Connection) -> None:
    """Have a machine that vanishes noticed within a minute or two."""
    with socket.socket(fileno=os.dup(link.fileno())) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, name):  # not on every system
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
