"""One plan by a compiler, in a process of its own: no device is needed and nothing is allocated.

Usage: python -m jaxrl.planner.compiling REQUEST.json ANSWER.json, with an environment that
`asking.environment` makes: virtual CPU devices must be asked for before jax is imported, and a
TPU's compiler ends the process on some errors.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl.config_io import load_config
from jaxrl.logprobs import HeadSplit
from jaxrl.models import ModelConfig
from jaxrl.planner.hlo import collectives_of, gathered_shapes
from jaxrl.planner.memory import StepMemory
from jaxrl.planner.run_shapes import RunShapes, bytes_a_device, shapes_of
from jaxrl.planner.sampling import abstract_sampler
from jaxrl.planner.targets import Target, parse_target
from jaxrl.sharding import make_mesh
from jaxrl.train_steps import make_steps
from jaxrl.vocab_blocks import block_plan

__all__ = ["main"]

_REFUSAL = re.compile(r"RESOURCE_EXHAUSTED|[Rr]an out of memory|exceeds available")


def main(request: Path, answer: Path) -> None:
    """Compile what the request asks for and write what the compiler says."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    config = load_config([asked["config"]])
    target = parse_target(asked["target"])
    devices = devices_of(target, asked["hbm"])
    if len(devices) != target.devices:
        raise SystemExit(f"target {target} has {len(devices)} devices, not {target.devices}")
    shapes = shapes_of(config, ModelConfig.from_hf(asked["model"]), make_mesh(config.mesh, devices))
    steps = []
    for step in asked["steps"]:
        steps.append(dataclasses.asdict(compiled(shapes, target, step, asked["keep"])))
    answer.write_text(json.dumps({"steps": steps, "versions": versions()}), encoding="utf-8")


def devices_of(target: Target, hbm: int | None) -> list[Any]:
    """Devices that exist for the compiler only."""
    if target.kind == "cpu":
        return list(jax.devices("cpu"))
    if target.kind == "tpu":
        name = f"{target.chip}:{target.topology}"
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    text = Path(__file__).with_name(f"{target.chip}.txtpb").read_text(encoding="utf-8")
    if hbm is not None:  # the scheduler and rematerialisation look at it
        text = re.sub(r"device_memory_size: \d+", f"device_memory_size: {hbm}", text)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=str(target.chip),
        target_config=text,
        topology=target.topology,
    )
    return list(described.devices)


def compiled(shapes: RunShapes, target: Target, step: str, keep: str | None) -> StepMemory:
    """What the compiler says about one step."""
    began = time.perf_counter()
    lowered, arguments, micros = _lower(shapes, step)
    empty = StepMemory(step, target.kind, 0, 0, 0, 0)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not _REFUSAL.search(str(error)):
            raise
        seconds = time.perf_counter() - began
        return dataclasses.replace(empty, refused=str(error)[:2000], seconds=seconds)
    seconds = time.perf_counter() - began
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None and text is not None
    if keep:
        Path(keep, f"{step}.hlo").write_text(text, encoding="utf-8")
    size, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    aliased = memory.alias_size_in_bytes
    # On CPU the field holds the arguments alone.
    peak = memory.peak_memory_in_bytes
    if target.kind == "cpu":
        peak = size + temporaries + memory.output_size_in_bytes - aliased
    return dataclasses.replace(
        empty,
        arguments=size,
        temporaries=temporaries,
        peak=peak,
        aliased=aliased,
        expected_arguments=_read(program, arguments),
        seconds=seconds,
        collectives=collectives_of(text, lambda depth: micros if depth == 0 else 1),
        gathered_logits=like_logits(shapes, text),
    )


def _lower(shapes: RunShapes, step: str) -> tuple[Any, Any, int]:
    """The step lowered, its arguments, and how often its outermost loop is taken at most."""
    layout, state = shapes.layout, shapes.state
    run: Callable[..., Any]
    if step == "sample":
        run, arguments = abstract_sampler(shapes)
        return run.lower(*arguments), arguments, shapes.config.rollout.max_new_tokens
    steps = make_steps(shapes.config, shapes.model, shapes.mesh, shapes.optimizers)
    if step == "update":
        arguments = (state, shapes.train_batch)
        return steps.update.lower(*arguments), arguments, layout.micros  # type: ignore[attr-defined]
    reference = state.policy_params if shapes.config.needs_reference else None
    arguments = (state.policy_params, state.value_params, reference, shapes.packed)
    run, micros = steps.score, layout.micros * layout.updates
    return run.lower(*arguments), arguments, micros  # type: ignore[attr-defined]


def _read(program: Any, arguments: Any) -> int:
    """Bytes of the arguments that the program reads; jit leaves out the others."""
    places, _ = program.input_shardings
    flat, leaves = (
        jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (places, arguments)
    )
    return bytes_a_device([x for x, place in zip(leaves, flat, strict=True) if place is not None])


def like_logits(shapes: RunShapes, text: str) -> tuple[str, ...]:
    """Shapes of all-gathers that give vocabulary columns without features, as logits are.

    Where a mesh splits the vocabulary, also those that give all of it.
    """
    mesh, layout, config = shapes.mesh, shapes.layout, shapes.model.config
    vocab, tensor = config.vocab_size, mesh.shape["tensor"]
    columns = {vocab, vocab // tensor}
    chunk = shapes.config.logprob.chunk_size
    if chunk is not None and mesh.size > 1:
        sizes = {"chunk_size": chunk, "softcap": None, "entropy": True, "split": HeadSplit(mesh)}
        block = block_plan(layout.rows, layout.policy_length, vocab, **sizes).vocab
        columns |= {block, block * tensor}
    features = {config.hidden_size, config.hidden_size // mesh.shape["fsdp"]}
    found = []
    for shape in gathered_shapes(text):
        whole = tensor > 1 and vocab in shape
        if len(shape) > 1 and (whole or (columns & set(shape) and not features & set(shape))):
            found.append(str(list(shape)))
    return tuple(found)


def versions() -> dict[str, str]:
    """Of what made the plan."""
    names = ("jax", "jaxlib", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "libtpu")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
