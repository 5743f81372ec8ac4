"""Functions that settings name as ``module:function``.

Standard library only: the reward worker loads this file on its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from types import ModuleType
from typing import Any

__all__ = ["load_function"]


def load_function(name: str, loaded: Mapping[str, ModuleType] | None = None) -> Callable[..., Any]:
    """The function behind ``module:function``; a module may lie in the working directory.

    Args:
        name: ``module:function``.
        loaded: Modules to take as they are instead of importing them.

    Raises:
        ImportError: Saying which half of the name leads nowhere, or what failed inside the module.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ImportError(f"{name!r} must read module:function")
    try:
        module = (loaded or {}).get(module_name) or _import(module_name)
    except Exception as error:
        raise ImportError(
            f"importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        function = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise ImportError(f"module {module_name} has nothing called {attribute}") from None
    if not callable(function):
        raise ImportError(f"{name} is {type(function).__name__}, not a function")
    return function


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
    # A script's own folder is on the path, the folder it is started from is not.
    sys.path.append(here)
    return importlib.import_module(name)
