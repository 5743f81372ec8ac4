"""Estimated temporaries of each step on one device, part by part.

Worked out from the steps' own loops and from what the compilers for GPUs and TPUs keep alive at
their peaks (docs/plans.md has the comparison). T and K are tokens and policy tokens of a row, b the
rows of a device, D, F, V and the heads those of the model, divided by `tensor` where it splits
them; c are the bytes of the compute dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrl.config import Config
from jaxrl.models import weight_table
from jaxrl.planner.run_shapes import RunShapes, bytes_a_device
from jaxrl.planner.sampling import largest_batch
from jaxrl.sharding import row_multiple

__all__ = ["sample_temporaries", "score_temporaries", "update_temporaries"]

_F32 = 4
_BLOCK = 4096
"""Tokens times vocabulary columns of a block of logits are at most its square (`vocab_blocks`)."""


@dataclass(frozen=True)
class _Sizes:
    """The quantities the formulas are written in."""

    rows: int  # b
    tokens: int  # T
    slots: int  # K
    width: int  # D
    inner: int  # F / t
    heads: int  # heads * head_dim / t
    query_heads: int  # heads / t
    kv_heads: int  # kv_heads * head_dim / t
    vocab: int  # V / t
    layers: int
    layer: int  # parameters of a layer / t, as gathered for use
    real: int  # c
    split: bool  # whether parameters lie on several devices

    @classmethod
    def of(cls, shapes: RunShapes) -> _Sizes:
        config, mesh, layout = shapes.model.config, shapes.mesh, shapes.layout
        tensor = mesh.shape["tensor"]
        table = weight_table(config)
        in_layers = sum(math.prod(w.full_shape) for w in table if w.path[0] == "layers")
        return cls(
            rows=layout.rows // row_multiple(mesh),
            tokens=layout.row_length,
            slots=layout.policy_length,
            width=config.hidden_size,
            inner=config.intermediate_size // tensor,
            heads=config.num_attention_heads * config.head_dim // tensor,
            query_heads=config.num_attention_heads // tensor,
            kv_heads=config.num_key_value_heads * config.head_dim // tensor,
            vocab=config.vocab_size // tensor,
            layers=config.num_hidden_layers,
            layer=in_layers // config.num_hidden_layers // tensor,
            real=jnp.dtype(shapes.model.dtype).itemsize,
            split=mesh.size > 1,
        )

    @property
    def stream(self) -> int:
        """The residual stream of a device's rows, once."""
        return self.rows * self.tokens * self.width * self.real

    def kept_a_layer(self, remat: str) -> int:
        """Bytes that a layer keeps for its backward pass."""
        products = 2 * (self.heads + self.kv_heads) + 2 * self.inner
        # Norms, rope and the gate's activation keep float32 copies.
        others = 10 * self.width + 5 * self.inner + 6 * (self.heads + self.kv_heads)
        attended = self.heads + _F32 * self.query_heads // self.real  # and a log-sum-exp a head
        more = {"full": 0, "attention": attended, "dots": products, "none": products + others}
        return self.stream + more[remat] * self.rows * self.tokens * self.real

    def block(self, chunk: int | None) -> tuple[int, int]:
        """Positions and vocabulary columns of a block of logits."""
        if chunk is None:
            return self.slots, self.vocab
        positions = max(1, min(chunk, self.slots, _BLOCK // self.rows))
        columns = _BLOCK * _BLOCK // (self.rows * positions) // 128 * 128
        return positions, min(self.vocab, max(128, columns))

    def logits(self, chunk: int | None) -> int:
        """One block of float32 logits."""
        positions, columns = self.block(chunk)
        return _F32 * self.rows * positions * columns

    @property
    def head(self) -> int:
        """The columns at hand of the head with all features, in the compute dtype.

        One device reads the head as it lies, block by block.
        """
        return self.vocab * self.width * self.real * self.split


def update_temporaries(shapes: RunShapes) -> dict[str, int]:
    """Parts of what an update needs beside its arguments."""
    size, state, config = _Sizes.of(shapes), shapes.state, shapes.config
    gradients = [bytes_a_device(x) for x in (state.policy_params, state.value_params)]
    parts = {
        "gradients, summed": sum(gradients),
        # A critic with its own trunk has its turn after the policy's.
        "gradients of a micro-batch": max(gradients) if _own_trunk(config) else sum(gradients),
        "kept by layers": size.layers * size.kept_a_layer(config.model.remat),
        "parameters turned": _turned(shapes, with_reference=False),
        "head": _head_backward(shapes, size),
        "layer": _layer_backward(size),
    }
    return _largest(parts, ("head", "layer"))


def score_temporaries(shapes: RunShapes) -> dict[str, int]:
    """Parts of what a score step needs beside its arguments; its result is among them."""
    size, layout, config = _Sizes.of(shapes), shapes.layout, shapes.config
    slots = layout.updates * layout.micros * size.rows * layout.policy_length
    # A tied head is gathered as it lies and then turned.
    heads = 2 if shapes.model.config.tie_word_embeddings else 1
    activations = 2 * size.inner + size.heads + 2 * size.kv_heads + 2 * size.width
    parts = {
        "anchors": 4 * _F32 * slots,
        "parameters turned": _turned(shapes, with_reference=config.needs_reference),
        "head": heads * size.head
        + 2 * size.stream
        + size.rows * size.slots * size.width * size.real
        + size.logits(config.logprob.chunk_size),
        "layer": size.layer * size.real + size.rows * size.tokens * size.real * activations,
    }
    return _largest(parts, ("head", "layer"))


def sample_temporaries(shapes: RunShapes) -> dict[str, int]:
    """Parts of what the trainside sampler needs beside the policy's parameters."""
    size, config, batch = _Sizes.of(shapes), shapes.config, largest_batch(shapes)
    shards, rollout = row_multiple(shapes.mesh), config.rollout
    rows, prompts = batch.prompts * batch.samples // shards, batch.prompts // shards
    column = 2 * size.layers * size.kv_heads * size.real
    whole = sum(math.prod(w.full_shape) for w in weight_table(shapes.model.config)) * size.real
    split = shapes.mesh.shape["tensor"] * (
        1 if rollout.gather_weights else shapes.mesh.shape["fsdp"]
    )
    filters = any((rollout.top_k, rollout.top_p < 1, rollout.min_p))
    activations = 3 * size.inner + 3 * size.heads + 4 * size.width
    cache = column * rows * (batch.columns + rollout.max_new_tokens - 1)
    prompts_cache = column * prompts * batch.columns
    layer = prompts * batch.columns * size.real * activations
    logits = (3 if filters else 1) * _F32 * rows * shapes.model.config.vocab_size
    return {
        "weights": whole // split,
        "cache": cache,
        # One after the other: prompts are computed, their cache is spread, tokens are drawn.
        "prompts or logits": max(prompts_cache + layer - cache, prompts_cache, logits),
    }


def _own_trunk(config: Config) -> bool:
    return config.needs_critic and config.critic.kind == "model"


def _turned(shapes: RunShapes, *, with_reference: bool) -> int:
    """Copies of split parameters in another layout, which compilers make once for all layers.

    Of what is multiplied along its rows: both projections back to the stream, and a tied head.
    """
    state = shapes.state
    if shapes.mesh.size == 1:
        return 0

    def of(trunk: Any, *more: Any) -> int:
        layers = trunk["layers"]
        return bytes_a_device((layers["attention"]["o"], layers["mlp"]["down"], *more))

    tied = shapes.model.config.tie_word_embeddings
    policy = of(state.policy_params, *([state.policy_params["embed"]] if tied else []))
    own = of(state.value_params["trunk"]) if _own_trunk(shapes.config) else 0
    return policy * (1 + with_reference) + own


def _head_backward(shapes: RunShapes, size: _Sizes) -> int:
    """The head's forward and backward pass; both are alive where compilers start buffers early."""
    chunk = shapes.config.logprob.chunk_size
    columns = size.block(chunk)[1]
    hidden = size.rows * size.slots * size.width
    return (
        size.head
        + (_F32 + 2 * size.real) * hidden
        + 3 * size.stream
        + (_F32 + 3 * size.real) * columns * size.width
        + 2 * size.logits(chunk)
    )


def _layer_backward(size: _Sizes) -> int:
    """One layer's backward pass: its weights whole, and its activations."""
    activations = 4 * size.inner + 5 * size.heads + 8 * size.kv_heads + 8 * size.width
    return size.layer * size.real + size.rows * size.tokens * size.real * activations


def _largest(parts: dict[str, int], phases: tuple[str, ...]) -> dict[str, int]:
    """Of phases that follow each other only the largest counts."""
    worst = max(phases, key=lambda name: parts[name])
    return {name: size for name, size in parts.items() if name not in phases or name == worst}
