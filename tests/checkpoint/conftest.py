"""The tiny models, saved once a session, and a store of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.checkpoint.state import CheckpointStore
from tests.checkpoint.families import Folder, make_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Gives the folder of a family's saved model, made once; treat it as read-only."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store that keeps two."""
    made = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()
