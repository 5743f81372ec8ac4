"""A tiny Llama with a SmolLM tokenizer, written as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, HEADS, KV_HEADS, INNER, HEAD_DIM = 64, 4, 2, 96, 16
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abc", "Ġ", "ab", "12"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order GGUF keeps: the halves of a head interleaved, row by row."""
    half = weight.shape[0] // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        start = head * 2 * half
        for pair in range(half):
            out[start + 2 * pair] = weight[start + pair]
            out[start + 2 * pair + 1] = weight[start + half + pair]
    return out


def weights() -> dict[str, np.ndarray]:
    """Names in GGUF -> weights in the layout of Hugging Face."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: str | None = None,
    quantized: str | None = None,
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights().items():
        if name.endswith("attn_q"):
            weight = permuted(weight, HEADS)
        if name.endswith("attn_k"):
            weight = permuted(weight, KV_HEADS)
        if name == quantized:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    if extra is not None:
        writer.add_tensor(extra, np.zeros((len(TOKENS), HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
