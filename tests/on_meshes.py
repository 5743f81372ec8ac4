"""Run by `test_fault_meshes` where JAX sees eight CPU devices: one batch on several meshes.

Usage: python on_meshes.py FOLDER, where a model and the results go: results.json, with a key for
each mesh and critic, and an .npz each, with the arrays of the state after two iterations.
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
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.sharding import make_mesh
from jaxrl.state import fresh_state, make_optimizers, reference_params
from jaxrl.train_steps import make_steps
from jaxrl.types import Prompt, Sampling, TrainState, Trajectory

MESHES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "one": ({}, ("head", "model")),
    "data 4": ({"data": 4}, ("head",)),
    "fsdp 8": ({"fsdp": 8}, ("head", "model")),
    "fsdp 4, tensor 2": ({"fsdp": 4, "tensor": 2}, ("head", "model")),
    "data 2, fsdp 2, tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, ("head", "model")),
}
"""Sizes, and which critics are tried."""
MODEL = ModelConfig(
    "qwen3",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
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


def on(mesh: Any, critic: str, model: Model, folder: Path) -> tuple[dict[str, Any], TrainState]:
    """Metrics of two iterations, the first one's advantages, and how many rows were computed."""
    config = toy_config(
        *(f"mesh.{axis}={size}" for axis, size in mesh.shape.items()),
        *(f"model.path={folder}", "model.remat=full", "rollout.prompts=3"),
        *("packing.row_lengths=[12]", "packing.micro_batch_tokens=96"),
        *("packing.share_prompts=false", "algorithm.kl_in=reward", f"critic.kind={critic}"),
        "optim.policy.lr=0.01",
    )
    optimizers = make_optimizers(config)
    real, seen = make_steps(config, model, mesh, optimizers), []

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
    return {"metrics": metrics, "advantages": seen[0], "rows": seen[1][2]}, state


def sampled(model: Model, params: Any) -> list[dict[str, Any]]:
    """Two completions for each of five prompts, drawn by the trainside sampler."""
    engine = TrainsideEngine(model, params, batch_size=10)
    prompts = [Prompt(row=i, ids=(1 + i, 2, 3)[: 1 + i % 3], text="", columns={}) for i in range(5)]
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop_token_ids=(0,))
    found = engine.generate(prompts, samples=2, sampling=sampling, seed=3)
    return [{"ids": t.response_ids, "logprobs": t.logprobs} for t in found]


def held(state: TrainState) -> dict[str, list[int]]:
    """Of each array, the elements on the device that holds most of it, and all elements."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): [max(s.data.size for s in x.addressable_shards), x.size]
        for path, x in leaves
    }


def main(folder: Path) -> None:
    """Every mesh with its critics."""
    export_hf(folder / "model", Model(MODEL).init(jax.random.key(3)), MODEL)
    results: dict[str, Any] = {}
    for name, (sizes, critics) in MESHES.items():
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        config = toy_config(*(f"mesh.{a}={sizes.get(a, 1)}" for a in ("data", "fsdp", "tensor")))
        mesh = make_mesh(config.mesh, devices)
        for critic in critics:
            # The second critic also has attention block by block, on each device's rows and heads.
            way = "dense" if critic == "head" else "blockwise"
            model = Model(MODEL, mesh=mesh, attention=way)
            result, state = on(mesh, critic, model, folder / "model")
            result["held"] = held(state)
            if critic == "head":
                result["sampled"] = sampled(model, state.policy_params)
            results[f"{name}, {critic}"] = result
            leaves = jax.tree_util.tree_leaves_with_path(state)
            arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
            np.savez(folder / f"{name}, {critic}.npz", **arrays)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
