"""GGUF in: turns a quantised Llama GGUF with a SmolLM tokenizer into a Hugging Face folder.

The weights are dequantised to bfloat16; no torch is needed. Only what is known to convert exactly
is accepted, everything else is refused by name. The package `gguf` is loaded when a file is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl.checkpoint.hf_files import TensorSource, whole_folder, write_json, write_weights
from jaxrl.errors import ConversionError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token


def convert_gguf(
    gguf_file: str | Path, out: str | Path, *, finish: Callable[[Path], None] | None = None
) -> None:
    """Writes the model of a GGUF file as a Hugging Face folder, whole or not at all.

    Args:
        gguf_file: A Llama model with a SmolLM tokenizer.
        out: The folder to write: config, generation config, bfloat16 safetensors, tokenizer with
            its chat template.
        finish: Called with the complete folder before it gets its final name, to add to it.

    Raises:
        ConversionError: If the file is missing or not GGUF, or its architecture or tokenizer is
            none of those above.
    """
    reader, fields = _open(Path(gguf_file))
    _expect(fields, "general.architecture", "llama")
    _expect(fields, "tokenizer.ggml.model", "gpt2")
    _expect(fields, "tokenizer.ggml.pre", "smollm")
    tensors = _tensors(reader, fields)
    with whole_folder(out) as folder:
        write_json(folder / "config.json", _config(fields, {t.name for t in tensors}))
        write_json(folder / "generation_config.json", _generation_config(fields))
        _write_tokenizer(folder, fields)
        write_weights(folder, tensors, dtype="bfloat16", max_shard_bytes=5_000_000_000)
        if finish is not None:
            finish(folder)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order in which GGUF stores the query and key projections of Llama.

    GGUF interleaves the two halves of each head (rows 0, h/2, 1, h/2+1, ...), Hugging Face keeps
    them one after the other.

    Args:
        weight: `[heads * head_dim, in]`, in GGUF's order.
        heads: Number of query heads, or of key heads.

    Returns:
        The same rows in Hugging Face's order.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _open(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    from gguf import GGUFReader

    if not path.is_file():
        raise ConversionError(f"{path} is no file; give the path of a .gguf file")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ConversionError(f"{path} is not a complete GGUF file: {error}") from error
    return reader, {name: field.contents() for name, field in reader.fields.items()}


def _expect(fields: dict[str, Any], key: str, value: str) -> None:
    if fields.get(key) != value:
        raise ConversionError(
            f"GGUF field {key}={fields.get(key)!r} is not supported, only {value!r} is; "
            "convert such a file with its own project's tools"
        )


def _tensors(reader: GGUFReader, fields: dict[str, Any]) -> list[TensorSource]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = []
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        kind = tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
        make = partial(_dequantised, tensor, shape, heads.get(kind))
        tensors.append(TensorSource(_hf_name(tensor.name), shape, make))
    return sorted(tensors, key=lambda tensor: tensor.name)


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP and parts[1] == "weight":
        return f"{_TOP[parts[0]]}.weight"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    raise ConversionError(f"GGUF tensor {name!r} is not part of a Llama model as known here")


def _dequantised(tensor: ReaderTensor, shape: tuple[int, ...], heads: int | None) -> np.ndarray:
    from gguf.quants import dequantize

    weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return weight if heads is None else unpermute(weight, heads)


def _config(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": hidden**-0.5,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # GGUF stores this number in float32: 9.9999997e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        # Both spellings: readers older and newer than the nested one.
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": theta,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [fields["tokenizer.ggml.eos_token_id"]],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # "smollm": each digit is a piece of its own, then GPT-2's byte-level splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    write_json(folder / "special_tokens_map.json", named)
    settings = {
        **named,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        # The generic class reads tokenizer.json as it is; GPT2Tokenizer would drop the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
