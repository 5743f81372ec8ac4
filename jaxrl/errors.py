"""The errors jaxrl raises: one root, each also the standard-library error a caller would expect.

Every message says what was given, what is allowed, and what to change.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "DataError",
    "JaxrlError",
    "RewardError",
    "RolloutError",
    "TrainingError",
]


class JaxrlError(Exception):
    """Root of every error jaxrl raises on purpose."""


class ConfigError(JaxrlError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another; names the dotted key."""


class DataError(JaxrlError, ValueError):
    """A prompt file, row, or tokenizer cannot be used; names the file and the row."""


class RewardError(JaxrlError, ValueError):
    """A reward function cannot be imported, failed, or returned something unusable."""


class RolloutError(JaxrlError, RuntimeError):
    """An engine could not produce the completions that were asked for."""


class CheckpointError(JaxrlError, RuntimeError):
    """A checkpoint is missing, half-written, incompatible, or cannot be written."""


class ConversionError(JaxrlError, ValueError):
    """A Hugging Face checkpoint or config cannot be read or written; lists all at fault."""


class TrainingError(JaxrlError, RuntimeError):
    """Training cannot go on, e.g. too many non-finite updates in a row."""
