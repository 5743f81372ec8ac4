"""The model and the inputs that `bench.py` measures with: random, seeded, of stated sizes.

Everything comes from NumPy generators in a stated order, so another library can be given the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.packing import pack, plan
from jaxrl.types import PackedBatch, Prompt, TrainBatch, Trajectory


@dataclass(frozen=True)
class Sizes:
    """What is computed; the defaults are the published table's."""

    layers: int = 4
    hidden: int = 256
    inner: int = 1024
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab: int = 32768
    rows: int = 8
    prompt: int = 128
    response: int = 384
    sampled_rows: int = 32
    sampled_prompt: int = 32
    sampled_new: int = 64
    gae_small: tuple[int, int] = (64, 1024)
    gae_large: tuple[int, int] = (256, 8192)


SMALL = Sizes(
    layers=2, hidden=32, inner=48, heads=4, kv_heads=2, head_dim=8, vocab=515, rows=2, prompt=8,
    response=24, sampled_rows=4, sampled_prompt=8, sampled_new=5, gae_small=(3, 40),
    gae_large=(5, 70),
)  # fmt: skip


def model_of(sizes: Sizes) -> Model:
    """The Qwen3 that is measured, in float32 with every layer recomputed in the backward pass."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocab,
            "rope_theta": 1_000_000,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": 40960,
        }
    )
    return Model(config)


def weights_of(model: Model) -> dict[str, Any]:
    """0.02 times standard normal draws in the order of Hugging Face's sorted names; norms are 1."""
    table = weight_table(model.config)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in sorted((n, w.hf_shape) for w in table for n in w.hf_names()):
        norm = name.endswith("norm.weight")
        draw = None if norm else rng.standard_normal(shape, np.float32) * np.float32(0.02)
        tensors[name] = np.ones(shape, np.float32) if draw is None else draw
    params: dict[str, Any] = {}
    for weight in table:
        layers = [weight.from_hf(tensors[name]) for name in weight.hf_names()]
        node = params
        for name in weight.path[:-1]:
            node = node.setdefault(name, {})
        node[weight.path[-1]] = jnp.asarray(np.stack(layers) if weight.stacked else layers[0])
    return params


def packed_rows(sizes: Sizes) -> PackedBatch:
    """The rows as the trainer packs them: one micro-batch [rows, prompt + response], no padding."""
    length = sizes.prompt + sizes.response
    ids = np.random.default_rng(1).integers(3, sizes.vocab, (sizes.rows, length), dtype=np.int32)
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
    rng, length = np.random.default_rng(5), sizes.prompt + sizes.response
    hidden = rng.standard_normal((sizes.rows, length, sizes.hidden), np.float32)
    head = rng.standard_normal((sizes.hidden, sizes.vocab), np.float32) * np.float32(0.02)
    targets = rng.integers(3, sizes.vocab, (sizes.rows, length), dtype=np.int32)
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)


def drawn_batch(sizes: Sizes, packed: PackedBatch, old: jax.Array) -> TrainBatch:
    """Advantages, returns and old values drawn; old log-probabilities moved off by a little."""
    rng = np.random.default_rng(2)
    draws = [rng.standard_normal((sizes.rows, sizes.response), np.float32) for _ in range(4)]
    wide = packed.policy_valid.shape[1] - sizes.response
    advantages, returns, values, noise = (jnp.pad(x, ((0, 0), (0, wide))) for x in draws)
    old = old + 0.1 * noise
    batch = TrainBatch(
        packed=packed, old_logprobs=old, old_values=values, ref_logprobs=old,
        advantages=advantages, returns=returns, weights=packed.policy_valid.astype(jnp.float32),
        positive=jnp.zeros_like(packed.policy_valid),
    )  # fmt: skip
    return jax.tree.map(lambda x: x[None], batch)
