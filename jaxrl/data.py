"""Prompts: rows from a source, tokenised once, taken in an order that can be saved and resumed."""

from __future__ import annotations

from typing import Any

from jaxrl.config import DataConfig, SourceConfig
from jaxrl.cursor import PromptCursor
from jaxrl.prompts import build_prompts, cut, load_tokenizer
from jaxrl.sources import load_rows
from jaxrl.types import Prompt

__all__ = ["PromptCursor", "build_prompts", "cut", "load_prompts", "load_rows", "load_tokenizer"]


def load_prompts(
    source: SourceConfig, tokenizer: Any, data: DataConfig, *, vocab_size: int
) -> tuple[list[Prompt], dict[str, int]]:
    """`build_prompts` of `load_rows`; messages about a row also name its file or generator."""
    where = str(source.path if source.kind == "file" else source.name)
    return build_prompts(load_rows(source), tokenizer, data, vocab_size=vocab_size, where=where)
