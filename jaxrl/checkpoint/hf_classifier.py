"""Hugging Face classifiers with one label: reward models and critics in, critics out.

Such a folder holds the trunk of a causal language model without its output head, and one row
`score.weight` [1, hidden]. A sequence classifier, the form of reward models, multiplies it with the
last token. A token classifier has a bias as well, `score.bias` [1], and an output at every token,
which is what a critic is: its output at token t is the value of the state after t.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxrl.checkpoint.hf import load_hf_config, read_weights
from jaxrl.checkpoint.hf_export import described, table_tensors, write_hf_folder
from jaxrl.checkpoint.hf_files import TensorSource
from jaxrl.errors import ConversionError
from jaxrl.models import ModelConfig, Weight, score_bias, score_weight, weight_table
from jaxrl.models.hf_config import ARCHITECTURES

__all__ = [
    "Kind",
    "critic_tensors",
    "export_critic",
    "head_tensors",
    "load_classifier",
    "load_trunk_config",
]

Kind = Literal["ForCausalLM", "ForSequenceClassification", "ForTokenClassification"]
"""What stands above the trunk: how the name of the architecture ends."""

_CLASSIFIERS: tuple[Kind, ...] = ("ForSequenceClassification", "ForTokenClassification")
_CRITIC: Kind = "ForTokenClassification"
# What transformers takes when a config says nothing.
_DEFAULT_LABELS = 2


def load_trunk_config(folder: str | Path) -> tuple[ModelConfig, Kind]:
    """The decoder in a folder, and what stands above it.

    Raises:
        ConversionError: Neither of a supported family, or a classifier with another number of
            labels than one.
    """
    config = load_hf_config(folder)
    names = config.get("architectures") or ()
    kind: Kind | None = next(
        (kind for kind in _CLASSIFIERS if any(str(name).endswith(kind) for name in names)), None
    )
    if kind is None:
        return ModelConfig.from_hf(config), "ForCausalLM"
    # The family is checked by `from_hf`, which knows no classifiers.
    trunk = ModelConfig.from_hf({k: v for k, v in config.items() if k != "architectures"})
    expected = ARCHITECTURES[trunk.model_type].replace("ForCausalLM", kind)
    if list(names) != [expected]:
        raise ConversionError(
            f"{folder}: architectures={list(names)} does not go with model_type "
            f"{trunk.model_type!r}; it must be [{expected!r}]"
        )
    _check_labels(folder, config)
    return trunk, kind


def load_classifier(
    folder: str | Path,
    config: ModelConfig,
    kind: Kind,
    *,
    dtype: str = "float32",
    shardings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The trunk's parameters, and a "value_head": "kernel" [hidden, 1], for tokens "bias" [1] too.

    Args:
        folder: A classifier's folder.
        config: Its decoder, from `load_trunk_config`.
        kind: Which classifier, from there too.
        dtype: Of the trunk; the value head is float32 always.
        shardings: See `jaxrl.checkpoint.hf.load_params`.

    Raises:
        ConversionError: Listing missing, unexpected, wrong-shape and wrong-type tensors.
    """
    return read_weights(folder, _table(config, kind), dtype=dtype, shardings=shardings)


def export_critic(
    out: str | Path,
    trunk: Mapping[str, Any],
    value_head: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a critic as a token classifier with one label, whole or not at all.

    `AutoModelForTokenClassification` then gives, as its one logit at token t, the value of the
    state after that token, V(s_t) = h_t · kernel + bias in reward units, h the trunk's hidden
    states after the final norm. `critic.path` with `critic.keep_head=true` starts a run from it.

    Args:
        out: The folder to write. An older model folder there is replaced at the very end.
        trunk: The decoder the head reads: the critic's own, or the policy's for a head on it. An
            output head among them is left out.
        value_head: {"kernel": [hidden, 1], "bias": [1]}.
        config: What the trunk is.
        source: A Hugging Face folder of the same decoder; see `export_hf`.
        dtype: "float32" or "bfloat16", of everything: such a folder has one, so bfloat16 rounds the
            value head too.
        max_shard_bytes: See `export_hf`.

    Returns:
        `out`, as a path.

    Raises:
        ConversionError: As `export_hf`.
    """
    tensors = critic_tensors(trunk, value_head, config)
    name = ARCHITECTURES[config.model_type].replace("ForCausalLM", _CRITIC)
    hf_config = described(config, source, dtype) | {
        "architectures": [name],
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
        "classifier_dropout": 0.0,  # else transformers drops a tenth of the states when it trains
    }
    return write_hf_folder(out, tensors, hf_config, source, dtype, max_shard_bytes)


def critic_tensors(
    trunk: Mapping[str, Any], value_head: Mapping[str, Any], config: ModelConfig
) -> list[TensorSource]:
    """All tensors of the token classifier that a critic is; arguments as for `export_critic`."""
    params = {name: tree for name, tree in trunk.items() if name not in ("head", "value_head")}
    return table_tensors({**params, "value_head": value_head}, _table(config, _CRITIC))


def head_tensors(value_head: Mapping[str, Any], config: ModelConfig) -> list[TensorSource]:
    """The critic's head alone, under the names it has in a token classifier."""
    return table_tensors({"value_head": value_head}, [score_weight(config), score_bias()])


def _table(config: ModelConfig, kind: Kind) -> list[Weight]:
    trunk = [weight for weight in weight_table(config) if weight.path[0] != "head"]
    bias = [score_bias()] if kind == "ForTokenClassification" else []
    return [*trunk, score_weight(config), *bias]


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
