"""Hugging Face sequence classifiers with one label in: reward models, and critics made of them.

Such a folder holds the trunk of a causal language model without its output head, and one row
`score.weight` [1, hidden] without a bias. transformers reads its product with the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.checkpoint.hf import load_hf_config, read_weights
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig, score_weight, weight_table
from jaxrl.models.hf_config import ARCHITECTURES

__all__ = ["load_classifier", "load_trunk_config"]

_SUFFIX = "ForSequenceClassification"
# What transformers takes when a config says nothing.
_DEFAULT_LABELS = 2


def load_trunk_config(folder: str | Path) -> tuple[ModelConfig, bool]:
    """The decoder in a folder, and whether it is a sequence classifier's (else a language model's).

    Raises:
        ConversionError: Neither of a supported family, or a classifier with another number of
            labels than one.
    """
    config = load_hf_config(folder)
    names = config.get("architectures") or ()
    if not any(str(name).endswith(_SUFFIX) for name in names):
        return ModelConfig.from_hf(config), False
    # The family is checked by `from_hf`, which knows no classifiers.
    trunk = ModelConfig.from_hf({k: v for k, v in config.items() if k != "architectures"})
    expected = ARCHITECTURES[trunk.model_type].replace("ForCausalLM", _SUFFIX)
    if list(names) != [expected]:
        raise ConversionError(
            f"{folder}: architectures={list(names)} does not go with model_type "
            f"{trunk.model_type!r}; it must be [{expected!r}]"
        )
    _check_labels(folder, config)
    return trunk, True


def load_classifier(
    folder: str | Path, config: ModelConfig, *, dtype: str = "float32"
) -> dict[str, Any]:
    """The trunk's parameters, and "value_head": {"kernel"}, float32 [hidden, 1].

    Args:
        folder: A classifier's folder.
        config: Its decoder, from `load_trunk_config`.
        dtype: Of the trunk.

    Raises:
        ConversionError: Listing missing, unexpected, wrong-shape and wrong-type tensors.
    """
    trunk = [weight for weight in weight_table(config) if weight.path[0] != "head"]
    return read_weights(folder, [*trunk, score_weight(config)], dtype=dtype)


def _check_labels(folder: str | Path, config: Mapping[str, Any]) -> None:
    given = {
        "num_labels": config.get("num_labels"),
        "id2label": None if config.get("id2label") is None else len(config["id2label"]),
    }
    stated = {name: count for name, count in given.items() if count is not None}
    for name, count in (stated or {"num_labels (the default)": _DEFAULT_LABELS}).items():
        if count != 1:
            raise ConversionError(
                f"{folder}: {name} gives {count} labels; a reward or value is one number, so the "
                "classifier must have num_labels=1"
            )
