"""Rules between the settings of `rollout` that concern prompts and episodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from jaxrl.config import Config, RolloutConfig

__all__ = ["rollout_rules"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_OFF = RolloutConfig()


def rollout_rules(config: Config) -> Iterator[str]:
    """One message for each rule that is broken: the dotted key, its value, and the fix."""
    yield from _episodes(config)
    yield from _dynamic_sampling(config)


def _episodes(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.env is None:
        for name in ("max_turns", "max_turn_tokens", "env_timeout_s"):
            value, off = getattr(rollout, name), getattr(_OFF, name)
            if value != off:
                yield (
                    f"rollout.{name}={value} is read with rollout.env only; set rollout.env, or "
                    f"this to {json.dumps(off)}"
                )
        return
    if not _FUNCTION.fullmatch(rollout.env):
        yield f"rollout.env={rollout.env!r} must read module:function"
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens > rollout.max_new_tokens:
        yield (
            f"rollout.max_turn_tokens={rollout.max_turn_tokens} must be at most "
            f"rollout.max_new_tokens={rollout.max_new_tokens}, which bounds all turns of an "
            "episode together"
        )


def _dynamic_sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.dynamic_sampling:
        if rollout.max_rounds != _OFF.max_rounds:
            yield (
                f"rollout.max_rounds={rollout.max_rounds} is read with "
                f"rollout.dynamic_sampling=true only; set that, or this to {_OFF.max_rounds}"
            )
        return
    if rollout.samples < 2:
        yield (
            "rollout.samples=1 leaves nothing to differ within a prompt; "
            "rollout.dynamic_sampling=true needs at least 2"
        )
    if rollout.max_rounds < 2:
        yield (
            "rollout.max_rounds=1 leaves no round to replace prompts in; "
            "rollout.dynamic_sampling=true needs at least 2"
        )
