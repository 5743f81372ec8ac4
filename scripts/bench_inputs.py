"""What `bench.py` and the programs of its peers compute with: NumPy alone, so that any can load it.

Every array comes from a seeded generator in a stated order; the peers' environments hold neither
jax in our version nor jaxrl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


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


def model_config(sizes: Sizes) -> dict[str, Any]:
    """The Qwen3 that is measured, as a Hugging Face config.json."""
    return {
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


def tensor_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes of that model's weights."""
    hidden, inner = sizes.hidden, sizes.inner
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (sizes.vocab, hidden),
    }
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (sizes.head_dim,),
        "self_attn.k_norm": (sizes.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(sizes.layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """0.02 times standard normal draws in the order of the sorted names; norms are 1."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    return {name: draw(name, shape) for name, shape in sorted(shapes.items())}


def token_rows(sizes: Sizes) -> Array:
    """Token ids [rows, prompt + response], all real."""
    length = sizes.prompt + sizes.response
    return np.random.default_rng(1).integers(3, sizes.vocab, (sizes.rows, length), dtype=np.int32)


class Draws(NamedTuple):
    """What a batch needs beside its tokens, each [rows, response], drawn in this order."""

    advantages: Array
    returns: Array
    values: Array
    noise: Array
    """A tenth of it is added to the model's log-probabilities to give the old ones."""


def drawn(sizes: Sizes) -> Draws:
    """Standard normal draws for the losses."""
    rng = np.random.default_rng(2)
    return Draws(*(rng.standard_normal((sizes.rows, sizes.response), np.float32) for _ in range(4)))


def sampled_prompts(sizes: Sizes) -> Array:
    """Prompts [rows, prompt] for the sampler."""
    shape = (sizes.sampled_rows, sizes.sampled_prompt)
    return np.random.default_rng(3).integers(3, sizes.vocab, shape, dtype=np.int32)


def gae_inputs(shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Rewards, values and a mask of unequal row lengths, each [rows, length]."""
    rng, (rows, length) = np.random.default_rng(4), shape
    rewards = rng.standard_normal((rows, length), np.float32)
    values = rng.standard_normal((rows, length), np.float32)
    mask = np.arange(length)[None] < rng.integers(length // 2, length + 1, (rows, 1))
    return rewards, values, mask


def head_arrays(sizes: Sizes) -> tuple[Array, Array, Array]:
    """Hidden states [rows, length, hidden], head [hidden, vocab] and targets [rows, length]."""
    rng, length = np.random.default_rng(5), sizes.prompt + sizes.response
    hidden = rng.standard_normal((sizes.rows, length, sizes.hidden), np.float32)
    head = rng.standard_normal((sizes.hidden, sizes.vocab), np.float32) * np.float32(0.02)
    targets = rng.integers(3, sizes.vocab, (sizes.rows, length), dtype=np.int32)
    return hidden, head, targets


class Ragged(NamedTuple):
    """Prompts of unequal lengths, and how long the response to each is to be."""

    prompts: list[list[int]]
    response_lengths: list[int]


def ragged_batch(rows: int = 16, vocab: int = 49152) -> Ragged:
    """Lengths at the middle quantiles of a log-normal of mean 64 and sigma 0.8, at most 256.

    One generator shuffles them for the prompts, again for the responses, then draws the ids.
    """
    sigma, mean, longest = 0.8, 64, 256
    middle = math.log(mean) - sigma**2 / 2
    quantiles = [NormalDist(middle, sigma).inv_cdf((i + 0.5) / rows) for i in range(rows)]
    lengths = [min(longest, max(1, round(math.exp(x)))) for x in quantiles]
    rng = np.random.default_rng(7)
    of_prompts, of_responses = rng.permutation(lengths), rng.permutation(lengths)
    prompts = [rng.integers(3, vocab, n).tolist() for n in of_prompts]
    return Ragged(prompts, of_responses.tolist())
