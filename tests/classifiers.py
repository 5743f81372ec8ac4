"""Tiny random sequence classifiers by transformers, in folders with a character tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing

from jaxrl.tiny import EOS, PAD, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + '>' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def save_model(folder: Path, family: str = "qwen3", *, kind: str = "reward", **keys: Any) -> Any:
    """A random model in `folder`; kind: "reward", or "lm" for a language model."""
    settings = {**_SIZES, **FAMILIES[family], **keys}
    if kind == "reward":
        settings = {"num_labels": 1, **settings}
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(sum(map(ord, family + kind)))
    auto: Any = {
        "reward": transformers.AutoModelForSequenceClassification,
        "lm": transformers.AutoModelForCausalLM,
    }[kind]
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    model.save_pretrained(folder)
    return model


def save_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, pad: str = PAD, bos: bool = False
) -> None:
    """The character tokenizer, into a model's folder; with bos it begins every text with <eos>."""
    tokenizer = tiny_tokenizer()
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{EOS} $A", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }
    if bos:
        settings["bos_token"] = EOS
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def change_config(folder: Path, **entries: Any) -> None:
    """Write entries into config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
