"""A reward for `test_joined_training`: fails on one process, and only once a file says so."""

from __future__ import annotations

import os
from pathlib import Path


def odd(completions: list[str], **columns: object) -> list[float]:
    """Share of characters with an odd code, so that there is spread; fails where it is told to."""
    del columns
    if Path(os.environ.get("REWARD_FAILS", "never")).exists():
        raise ValueError("the answer key is gone")
    return [sum(ord(c) % 2 for c in text) / max(len(text), 1) for text in completions]
