"""What all tests share: CPU unless told otherwise, and no silent broadcasting between ranks."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine; a compilation inside an example is no reason to fail.
hypothesis.settings.register_profile("jaxrl", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("jaxrl")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """Each file leaves no compiled programs behind.

    A compiled program holds some twenty memory mappings, and Linux gives a process 65,530 of them
    (vm.max_map_count): a worker that keeps every program of the suite dies of it in the compiler.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the warmed-up tiny model, made once; treat it as read-only."""
    from jaxrl.tiny import make

    folder = tmp_path_factory.mktemp("tiny") / "base"
    make(str(folder), 0)
    return folder
