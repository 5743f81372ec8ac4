"""Memory that the C library keeps after it was freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back"]


def give_back() -> None:
    """Return freed pages to the system; does nothing where the C library has no `malloc_trim`.

    glibc keeps freed blocks of less than 32 MiB for later ones. Those of a rollout are many and
    not of the sizes that an update asks for, so both would count in the peak of the process.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
