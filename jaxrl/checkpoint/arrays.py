"""The arrays of a checkpoint on disk: the one door to Orbax.

`save` returns as soon as the arrays may be donated or overwritten; files are written behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.checkpoint.leaves import spec
from jaxrl.checkpoint.stream import cuts
from jaxrl.errors import CheckpointError

__all__ = ["ArrayFiles"]


class ArrayFiles:
    """Writes and reads folders of named arrays; of several processes each its own shards."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        )

    def save(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Begin to write `arrays` into the new `folder`; raises whatever Orbax raises."""
        how = {name: ocp.SaveArgs(**cuts(name, *spec(leaf))) for name, leaf in arrays.items()}
        self._orbax.save(folder, args=ocp.args.PyTreeSave(dict(arrays), save_args=how))

    def wait(self) -> None:
        """Block until what was begun is written; raises what went wrong with it."""
        self._orbax.wait_until_finished()

    def read(self, folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays named in `like`, each placed as its entry is.

        Args:
            folder: what `save` wrote.
            like: by name, an array or a ShapeDtypeStruct, for shape, dtype and sharding; anything
                else: the array comes back as NumPy, as it was saved.

        Raises:
            CheckpointError: Orbax cannot read it.
        """
        request = ocp.args.PyTreeRestore(
            item={name: np.zeros(()) for name in like},  # only the names are looked at
            restore_args={name: _kind(leaf) for name, leaf in like.items()},
            partial_restore=True,
        )
        try:
            return self._orbax.restore(folder, args=request)
        except Exception as error:
            raise CheckpointError(
                f"Orbax cannot read {folder}: {error}; delete {folder.parent} to go on without it"
            ) from error

    def close(self) -> None:
        """Let Orbax's threads go."""
        self._orbax.close()


def _kind(leaf: Any) -> ocp.RestoreArgs:
    """What Orbax shall make of a stored array so that it is like `leaf`."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)
