"""A reward for `test_joined_training`: fails once a file says so, and takes its time where told."""

from __future__ import annotations

import os
import time
from pathlib import Path


def odd(completions: list[str], **columns: object) -> list[float]:
    """Share of characters with an odd code, so that there is spread; fails where it is told to."""
    del columns
    if Path(os.environ.get("REWARD_FAILS", "never")).exists():
        raise ValueError("the answer key is gone")
    # So that a run is not at its end before a test has seen its next checkpoint.
    time.sleep(float(os.environ.get("REWARD_SLEEPS", "0")))
    return [sum(ord(c) % 2 for c in text) / max(len(text), 1) for text in completions]
