"""Run by `test_fault_meshes` where JAX sees four CPU devices: one batch on several meshes.

Usage: python on_meshes.py FOLDER, which becomes a model; prints a JSON object with a mesh a key.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from iterating import iterations_of, made_up, toy_config

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.models import Model, ModelConfig
from jaxrl.setup import _steps
from jaxrl.sharding import make_mesh
from jaxrl.state import fresh_state, make_optimizers, reference_params
from jaxrl.types import Trajectory

MESHES = {
    "one": {},
    "data 2": {"data": 2},
    "fsdp 2": {"fsdp": 2},
    "tensor 2": {"tensor": 2},
    "data 2, tensor 2": {"data": 2, "tensor": 2},
    "data 4": {"data": 4},
}
MODEL = ModelConfig(
    "qwen3",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    initializer_range=0.4,
)


def six_rows() -> tuple[list[Trajectory], Any]:
    """Six responses of the full length, so that each has a row of its own."""
    trajectories, scores = made_up(6)
    full = [
        dataclasses.replace(
            t,
            response_ids=(t.response_ids * 4)[:8],
            logprobs=(t.logprobs * 4)[:8],
            loss_mask=((t.loss_mask * 4)[:7] + (True,)),
        )
        for t in trajectories
    ]
    return full, scores


def on(sizes: dict[str, int], folder: str) -> dict[str, Any]:
    """Metrics of two iterations, the first one's advantages, and how many rows were computed."""
    config = toy_config(
        *(f"mesh.{axis}={sizes.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")),
        *(f"model.path={folder}", "model.remat=none", "rollout.prompts=3"),
        *("packing.row_lengths=[12]", "packing.micro_batch_tokens=96"),
        *("packing.share_prompts=false", "algorithm.kl_in=reward", "critic.kind=head"),
    )
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh, model, optimizers = make_mesh(config.mesh, devices), Model(MODEL), make_optimizers(config)
    real, seen = _steps(config, model, mesh, optimizers), []

    def advantage(packed: Any, *arguments: Any) -> Any:
        batch, figures = real.advantage(packed, *arguments)
        valid, owner = np.asarray(packed.policy_valid), np.asarray(packed.trajectory)
        advantages = np.asarray(batch.advantages)
        seen.append([advantages[valid & (owner == i)].tolist() for i in range(6)])
        seen.append(packed.tokens.shape)
        return batch, figures

    state, metrics = iterations_of(
        config,
        [six_rows()] * 2,
        steps=SimpleNamespace(score=real.score, advantage=advantage, update=real.update),
        state=fresh_state(config, model, mesh, optimizers),
        reference=reference_params(config, model, mesh),
        mesh=mesh,
    )
    return {
        "metrics": metrics,
        "advantages": seen[0],
        "rows": seen[1][2],
        "moved": [float(np.abs(np.asarray(x)).sum()) for x in jax.tree.leaves(state.policy_params)],
    }


if __name__ == "__main__":
    export_hf(Path(sys.argv[1]), Model(MODEL).init(jax.random.key(3)), MODEL)
    print(json.dumps({name: on(sizes, sys.argv[1]) for name, sizes in MESHES.items()}))
