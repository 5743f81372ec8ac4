"""Run by `test_plan_compilers` where JAX sees eight CPU devices: what a planned run allocates.

Usage: python planned_run.py FOLDER OVERRIDES...; a model is made in FOLDER/model, and the bytes of
what the first iteration holds on each device are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent))
from planning_for import MODEL, planned_config

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.iteration import pack_for, plan_for
from jaxrl.models import Model
from jaxrl.planner import RunShapes, shapes_of
from jaxrl.planner.compiling import like_logits
from jaxrl.sharding import batch_sharding, make_mesh, row_multiple
from jaxrl.state import fresh_state, make_optimizers, reference_params
from jaxrl.train_steps import make_model, make_steps
from jaxrl.types import Outcomes, Prompt, Trajectory


def trajectories(config: Any) -> list[Trajectory]:
    """Everything as long as it may be."""
    new, length = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    prompts = [
        Prompt(row=i, ids=(1 + i,) * length, text="", columns={})
        for i in range(config.rollout.prompts)
    ]
    return [
        Trajectory(
            prompt=prompt,
            sample=i,
            response_ids=(2,) * new,
            logprobs=(-1.0,) * new,
            finish_reason="length",
        )
        for prompt in prompts
        for i in range(config.rollout.samples)
    ]


def on_each_device(tree: Any) -> list[int]:
    """Bytes of the shards that each device has."""
    sizes = dict.fromkeys((device.id for device in jax.devices()), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            sizes[shard.device.id] += shard.data.nbytes
    return list(sizes.values())


def seen_to_gather(shapes: RunShapes, *places: Any) -> tuple[str, ...]:
    """What `like_logits` sees in a program whose logits are made here and wanted there."""
    rows, mesh = shapes.layout.rows, shapes.mesh
    made, wanted = (NamedSharding(mesh, PartitionSpec(*place)) for place in places)
    hidden = jax.ShapeDtypeStruct((rows, 16, 32), np.float32, sharding=batch_sharding(mesh, 0))
    columns = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    head = jax.ShapeDtypeStruct((32, 208), np.float32, sharding=columns)

    def logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(hidden @ head, made) * 2

    text = jax.jit(logits, out_shardings=wanted).lower(hidden, head).compile().as_text()
    return like_logits(shapes, text or "")


def main(folder: Path, overrides: list[str]) -> None:
    """An iteration up to its first update, as the trainer does it."""
    export_hf(folder / "model", Model(MODEL).init(jax.random.key(3)), MODEL)
    config = planned_config(f"model.path={folder / 'model'}", *overrides)
    mesh, optimizers = make_mesh(config.mesh), make_optimizers(config)
    model = make_model(config, MODEL, mesh)
    steps = make_steps(config, model, mesh, optimizers)
    state = fresh_state(config, model, mesh, optimizers)
    reference = reference_params(config, model, mesh)
    given = trajectories(config)
    layout = plan_for(config, given, row_multiple(mesh))
    packed = jax.device_put(pack_for(config, given, layout), batch_sharding(mesh))
    anchors = steps.score(state.policy_params, state.value_params, reference, packed)
    outcomes = Outcomes(
        scores=np.arange(len(given), dtype=np.float32),
        groups=np.arange(len(given), dtype=np.int32) // config.rollout.samples,
        truncated=np.ones(len(given), bool),
        positive=np.zeros(len(given), bool),
    )
    trained, _ = steps.advantage(packed, anchors, outcomes, state.kl_coef)
    rows = ("data", "fsdp")
    shapes = shapes_of(config, MODEL, mesh)
    split, whole = (rows, None, "tensor"), (rows, None, None)
    gathered = {"kept": seen_to_gather(shapes, split, split)}
    gathered |= {"columns": seen_to_gather(shapes, split, whole)}
    gathered |= {"rows": seen_to_gather(shapes, split, (None, None, "tensor"))}
    found = {
        "policy parameters": state.policy_params,
        "policy optimizer": state.policy_opt,
        "value parameters": state.value_params,
        "value optimizer": state.value_opt,
        "reference": reference,
        "packed batch": packed,
        "anchors": anchors,
        "training batch": trained,
    }
    sizes: dict[str, Any] = {name: on_each_device(tree) for name, tree in found.items()}
    sizes["layout"] = [layout.updates, layout.micros, layout.rows, layout.row_length]
    sizes["gathered"] = gathered
    print(json.dumps(sizes | {"policy_length": layout.policy_length}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
