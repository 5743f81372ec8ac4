"""The model and the inputs of `bench_inputs`, as jaxrl takes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import Sizes, drawn, head_arrays, model_config, tensors, token_rows

from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.packing import pack, plan
from jaxrl.types import PackedBatch, Prompt, TrainBatch, Trajectory


def model_of(sizes: Sizes) -> Model:
    """The Qwen3 that is measured, in float32; all of a layer but attention is recomputed."""
    return Model(ModelConfig.from_hf(model_config(sizes)), remat="attention")


def weights_of(model: Model) -> dict[str, Any]:
    """The drawn tensors, in our layout."""
    table = weight_table(model.config)
    values = tensors({name: w.hf_shape for w in table for name in w.hf_names()})
    params: dict[str, Any] = {}
    for weight in table:
        layers = [weight.from_hf(values[name]) for name in weight.hf_names()]
        node = params
        for name in weight.path[:-1]:
            node = node.setdefault(name, {})
        node[weight.path[-1]] = jnp.asarray(np.stack(layers) if weight.stacked else layers[0])
    return params


def packed_rows(sizes: Sizes) -> PackedBatch:
    """The rows as the trainer packs them: one micro-batch [rows, prompt + response], no padding."""
    ids, length = token_rows(sizes), sizes.prompt + sizes.response
    finished = [
        Trajectory(
            prompt=Prompt(row=i, ids=tuple(row[: sizes.prompt].tolist()), text="", columns={}),
            sample=0,
            response_ids=tuple(row[sizes.prompt :].tolist()),
            logprobs=(0.0,) * sizes.response,
            finish_reason="length",
        )
        for i, row in enumerate(ids)
    ]
    layout = plan(
        [sizes.prompt] * sizes.rows, [sizes.response] * sizes.rows, [sizes.response] * sizes.rows,
        updates=1, micro_batch_tokens=sizes.rows * length, row_lengths=[length],
    )  # fmt: skip
    return jax.tree.map(lambda x: jnp.asarray(x[0, 0]), pack(finished, layout))


def head_inputs(sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states [rows, length, hidden], head [hidden, vocab] and targets."""
    hidden, head, targets = head_arrays(sizes)
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)


def drawn_batch(sizes: Sizes, packed: PackedBatch, old: jax.Array) -> TrainBatch:
    """Advantages, returns and old values drawn; old log-probabilities moved off by a little."""
    wide = packed.policy_valid.shape[1] - sizes.response
    advantages, returns, values, noise = (jnp.pad(x, ((0, 0), (0, wide))) for x in drawn(sizes))
    old = old + 0.1 * noise
    batch = TrainBatch(
        packed=packed, old_logprobs=old, old_values=values, ref_logprobs=old,
        advantages=advantages, returns=returns, weights=packed.policy_valid.astype(jnp.float32),
        positive=jnp.zeros_like(packed.policy_valid),
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], batch)
