"""The trainside sampler as shapes: the largest batch that it decodes at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.sampling import Knobs
from jaxrl.planner.run_shapes import RunShapes
from jaxrl.rollout.batches import Batch, plan_batches
from jaxrl.rollout.sampler import Prompts, Request, sample_batch
from jaxrl.sharding import replicated, row_multiple
from jaxrl.types import Sampling

__all__ = ["abstract_sampler", "largest_batch"]


def largest_batch(shapes: RunShapes) -> Batch:
    """Rows and columns when every prompt is as long as it may be."""
    config = shapes.config
    batches = plan_batches(
        [config.data.max_prompt_tokens] * config.rollout.prompts,
        config.rollout.samples,
        config.rollout.batch_size,
        row_multiple(shapes.mesh),
    )
    return max(batches, key=lambda batch: batch.prompts * batch.samples)


def abstract_sampler(shapes: RunShapes) -> tuple[Any, tuple[Any, ...]]:
    """The sampler as the engine jits it, and its arguments; allocates nothing."""
    config, mesh, batch = shapes.config, shapes.mesh, largest_batch(shapes)
    rollout, count = config.rollout, batch.prompts * batch.samples
    stops = 4 * -(-max(len(rollout.stop_token_ids or ()), 1) // 4)
    sampling = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
    )

    def request() -> tuple[Prompts, Request]:
        rows = jnp.zeros((batch.prompts, batch.columns), jnp.int32)
        each = jnp.zeros(batch.prompts, jnp.int32)
        return Prompts(rows, rows, each, each), Request(
            keys=jax.random.split(jax.random.key(0), count),
            limits=jnp.zeros(count, jnp.int32),
            stop_ids=jnp.zeros(stops, jnp.int32),
            knobs=Knobs.of(sampling),
        )

    whole = replicated(mesh)
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(request)
    )
    sample = partial(
        sample_batch,
        shapes.model,
        samples=batch.samples,
        max_new_tokens=rollout.max_new_tokens,
        gather=rollout.gather_weights,
    )
    return jax.jit(sample, out_shardings=whole), (shapes.state.policy_params, *shaped)
