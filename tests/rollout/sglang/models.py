"""A tiny Qwen3 with a tokenizer, as a folder that both jaxrl and a server read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.models import Model, ModelConfig

VOCAB, EOS = 512, 2
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_params(seed: int = 0) -> dict[str, Any]:
    """Random parameters whose next tokens are far from equally likely."""
    params = jax.device_get(Model(CONFIG).init(jax.random.key(seed)))
    noise = np.random.default_rng(seed)

    def widened(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        names = [entry.key for entry in path]
        if names[-1] == "scale":
            return leaf + 0.1 * noise.standard_normal(leaf.shape).astype(leaf.dtype)
        return leaf * np.float32(12.0 if names[0] == "head" else 2.5)

    return jax.tree_util.tree_map_with_path(widened, params)


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write the model that belongs to a seed; the tokenizer is the same for all."""
    source = folder.with_name(folder.name + "-source")
    make_tokenizer().save_pretrained(source)
    config = CONFIG.to_hf() | {"eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0}
    Qwen3Config(**config).save_pretrained(source)
    return export_hf(folder, make_params(seed), CONFIG, source=source)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and some merges, learnt from sums; fewer tokens than the model has rows is fine."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sums = [f"{i} plus {j} is {i + j}.\n" for i in range(50) for j in range(50)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sums, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_TEMPLATE,
    )
