"""The plan without a compiler: exact bytes of what lies on a device, estimates of the rest."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl.models import weight_table
from jaxrl.planner.memory import StepMemory
from jaxrl.planner.run_shapes import RunShapes, bytes_a_device
from jaxrl.planner.temporaries import sample_temporaries, score_temporaries, update_temporaries

__all__ = ["allowance", "beside", "estimated_steps", "held", "host_memory"]

_PROCESS = 2**30
"""A process with the libraries loaded and nothing else, about."""
_READING = 2**28
"""What reading a checkpoint takes beside what it returns (`checkpoint.hf`)."""
_CONTEXT = int(1.5 * 2**30)
"""A GPU's context, communication buffers and library workspaces, which no compiler counts."""


def held(shapes: RunShapes) -> dict[str, int]:
    """Exact bytes on one device of everything that outlives a step."""
    state, layout = shapes.state, shapes.layout
    parts: dict[str, Any] = {
        "policy parameters": state.policy_params,
        "policy optimizer": state.policy_opt,
        "value parameters": state.value_params,
        "value optimizer": state.value_opt,
        "counters": _counters(state),
        "reference": state.policy_params if shapes.config.needs_reference else None,
        "packed batch": shapes.packed,
    }
    sizes = {name: bytes_a_device(tree) for name, tree in parts.items()}
    sizes["anchors"] = bytes_a_device([shapes.packed.behaviour_logprobs] * 4)
    sizes["training batch"] = layout.updates * bytes_a_device(shapes.train_batch)
    return sizes


def _counters(state: Any) -> list[Any]:
    return [
        *(state.updates, state.iteration, state.kl_coef),
        *(state.reward_moments, state.skipped, state.skipped_in_a_row),
    ]


def beside(shapes: RunShapes, step: str) -> int:
    """Bytes that lie on a device during a step and are no arguments of it."""
    sizes = held(shapes)
    optimizers = ("policy optimizer", "value optimizer", "counters")
    during = {
        "update": ("reference", "packed batch", "anchors", "training batch"),
        "score": optimizers,
        "sample": (*optimizers, "value parameters", "reference"),
    }
    return sum(sizes[name] for name in during[step])


def allowance(platform: str | None, peak: int) -> int:
    """Bytes that a device needs for what no compiler knows."""
    return _CONTEXT + peak // 20 if platform == "cuda" else 0


def estimated_steps(shapes: RunShapes, platform: str | None = None) -> tuple[StepMemory, ...]:
    """Estimates of all steps that a device of the run does."""
    sizes = held(shapes)
    reads = {
        "score": ("policy parameters", "value parameters", "reference", "packed batch"),
        "update": (
            *("policy parameters", "policy optimizer"),
            *("value parameters", "value optimizer", "counters"),
        ),
        "sample": ("policy parameters",),
    }
    parts = {"score": score_temporaries(shapes), "update": update_temporaries(shapes)}
    if shapes.config.rollout.engine == "trainside":
        parts["sample"] = sample_temporaries(shapes)
    found = []
    for step, made_of in parts.items():
        arguments = sum(sizes[name] for name in reads[step])
        if step == "update":
            arguments += bytes_a_device(shapes.train_batch)
        temporaries = sum(made_of.values())
        peak = arguments + temporaries
        found.append(
            StepMemory(
                step,
                "estimate",
                arguments,
                temporaries,
                peak,
                beside(shapes, step),
                aliased=bytes_a_device(shapes.state) if step == "update" else 0,
                expected_arguments=arguments,
                parts=made_of,
                allowance=allowance(platform, peak),
            )
        )
    return tuple(found)


def host_memory(shapes: RunShapes, devices: int) -> dict[str, int]:
    """Estimated bytes on a host with so many devices.

    A checkpoint is written while training goes on, from a copy of the host's part of the state.
    """
    state = bytes_a_device(shapes.state)
    batch = jax.tree.leaves(shapes.packed)
    table = weight_table(shapes.model.config)
    largest = max(int(np.prod(weight.full_shape)) for weight in table) * 4
    return {
        "process": _PROCESS,
        "reading the model": _READING + min(largest, _READING),
        "checkpoint being written": state * devices,
        "packed batch": sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in batch),
    }
