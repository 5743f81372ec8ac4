"""Where prompts come from."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "DataConfig",
    "SourceConfig",
]


@dataclass(frozen=True)
class SourceConfig:
    """Where prompts come from (sections `data.train` and `data.eval`)."""

    kind: Literal["file", "reasoning_gym", "python"] = "file"
    """A file or dataset folder; a reasoning_gym generator; a Python function that yields rows."""
    path: str | None = None
    """For kind=file: JSONL, parquet, or a Hugging Face dataset folder."""
    split: str | None = None
    """For a dataset folder with several splits: which one."""
    name: str | None = None
    """For kind=reasoning_gym: the dataset's name; for kind=python: `module:function`."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator or function."""
    size: int | None = None
    """Rows to use; null uses all (required for reasoning_gym)."""
    seed: int = 0
    """Seed of a reasoning_gym generator."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts (section `data`)."""

    train: SourceConfig = field(default_factory=SourceConfig)
    """Prompts to train on."""
    eval: SourceConfig | None = None
    """Held-out prompts; null evaluates nothing."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    chat: bool = True
    """Whether a string prompt is put through the chat template as a user message."""
    system: str | None = None
    """System message put before a string prompt (chat only); null leaves it to the template."""
    chat_template: str | None = None
    """Jinja template, or the path of a file holding one, that replaces the tokenizer's own."""
    max_prompt_tokens: int = 512
    """Longest prompt, in tokens."""
    overlong: Literal["drop", "error", "left", "right", "middle"] = "drop"
    """A longer prompt is dropped and counted, stops the run, or loses tokens at its left end
    (the last max_prompt_tokens stay), at its right end, or in its middle."""
    shuffle: bool = True
    """A new order every epoch, drawn from the seed."""
