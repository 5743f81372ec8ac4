"""The far side of `scoring`: a process that runs reward functions in its main thread.

It is started as a file with two inherited descriptors, in a fresh interpreter, and imports the
standard library and what the functions themselves ask for, nothing else. Every request is a tuple
and has one tuple for an answer, except that ``raised`` is followed by ``culprit``:

    ("load", sys_path, names)  -> ("loaded",) | ("missing", index, text)
    ("batch", columns)         -> ("ready",) | ("unreadable", text)
    ("call", index)            -> ("values", list) | ("unusable", text)
                                  | ("raised", text), ("culprit", index or None)
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

__all__: list[str] = []


def _beside(name: str) -> ModuleType:
    """A module of this folder, by its place: importing the package would load JAX here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_values = _beside("reward_values")


def _main(commands: int, lifeline: int) -> None:
    for descriptor in (commands, lifeline):
        os.set_inheritable(descriptor, False)  # not for programs that the functions start
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    connection = Connection(commands)
    functions: list[Callable[..., Any]] = []
    batch: dict[str, list[Any]] = {}
    while True:
        try:
            kind, *arguments = connection.recv()
        except EOFError:
            return
        except Exception as error:
            connection.send(("unreadable", f"{type(error).__name__}: {error}"))
            continue
        if kind == "load":
            connection.send(_load(functions, *arguments))
        elif kind == "batch":
            (batch,) = arguments
            connection.send(("ready",))
        else:
            for answer in _call(functions[arguments[0]], batch):
                connection.send(answer)


def _die_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns only when the other end is closed, however the parent ended
    os._exit(1)


def _load(
    functions: list[Callable[..., Any]], path: list[str], names: list[str]
) -> tuple[Any, ...]:
    sys.path[:] = path
    load_function = _beside("named_function").load_function
    own = {"jaxrl.reward_functions": _beside("reward_functions")}
    for index, name in enumerate(names):
        try:
            functions.append(load_function(name, own))
        except ImportError as error:
            return ("missing", index, str(error))
    return ("loaded",)


def _call(function: Callable[..., Any], batch: dict[str, list[Any]]) -> Iterator[tuple[Any, ...]]:
    try:
        answer = _outcome(function, batch)
    except BaseException as error:
        inside = error.__traceback__
        for _ in range(2):  # the two frames of this file say nothing about the function
            inside = inside.tb_next if inside else None
        lines = traceback.format_exception(type(error), error, inside)
        yield ("raised", "".join(lines).strip())
        yield ("culprit", _culprit(function, batch))
    else:
        yield answer


def _outcome(function: Callable[..., Any], batch: dict[str, list[Any]]) -> tuple[Any, ...]:
    ids = batch["completion_ids"]
    # Copies: what one function does to its arguments is not seen by the next.
    arguments = {name: list(column) for name, column in batch.items()}
    arguments["completion_ids"] = [list(tokens) for tokens in ids]
    result = function(**arguments)
    try:
        return ("values", _values.read_rewards(result, [len(tokens) for tokens in ids]))
    except _values.UnusableReward as error:
        return ("unusable", str(error))


def _culprit(function: Callable[..., Any], batch: dict[str, list[Any]]) -> int | None:
    """The first completion for which the function raises when it is called for that one alone."""
    for index in range(len(batch["completions"])):
        try:
            function(**{name: [column[index]] for name, column in batch.items()})
        except BaseException:
            return index
    return None


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
