"""Run by `test_hf_placed` in each of two processes: what each reads, and an export by both.

Usage: python placed_by_two.py FOLDER PORT INDEX, where JAX sees two CPU devices; FOLDER has a model
in `own`. Prints the bytes that were read.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import jax
import numpy as np
from placed_on_eight import OWN, counted, shardings, small_pieces

from jaxrl.checkpoint.hf import load_params
from jaxrl.checkpoint.hf_export import export_hf, hf_tensors
from jaxrl.config import MeshConfig
from jaxrl.processes import connect
from jaxrl.sharding import make_mesh


def main(folder: Path, port: str, index: int) -> None:
    peers = connect(f"127.0.0.1:{port}", 2, index)
    mesh = make_mesh(MeshConfig(1, 4, 1))
    whole = load_params(folder / "own", OWN)
    with small_pieces(1024), counted() as counts:
        placed = load_params(folder / "own", OWN, shardings=shardings(mesh, OWN))
        for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
            assert len(one.addressable_shards) == 2
            for shard in one.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), other[shard.index])
        if peers.leads:
            export_hf(folder / "exported", placed, OWN)
        else:
            for tensor in hf_tensors(placed, OWN):
                deque(tensor.pieces(), maxlen=0)
    peers.close()
    print(sum(counts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
