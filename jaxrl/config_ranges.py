"""The range of every numeric setting, in interval notation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jaxrl.config import Config

__all__ = ["out_of_range"]

_RANGES = {
    "seed": "[0, 4294967296)",
    "iterations": "[1, inf)",
    "critic.warmup_iterations": "[0, inf)",
    "data.train.size": "[1, inf)",
    "data.eval.size": "[1, inf)",
    "data.max_prompt_tokens": "[1, inf)",
    "reward.timeout_s": "(0, inf)",
    "reward.scale": "(-inf, inf)",
    "reward.shift": "(-inf, inf)",
    "reward.clip": "(0, inf)",
    "rollout.prompts": "[1, inf)",
    "rollout.samples": "[1, inf)",
    "rollout.max_new_tokens": "[1, inf)",
    "rollout.temperature": "(0, inf)",
    "rollout.top_k": "[0, inf)",
    "rollout.top_p": "(0, 1]",
    "rollout.min_p": "[0, 1)",
    "rollout.max_rounds": "[1, inf)",
    "rollout.max_turns": "[1, inf)",
    "rollout.max_turn_tokens": "[1, inf)",
    "rollout.env_timeout_s": "(0, inf)",
    "rollout.batch_size": "[1, inf)",
    "rollout.max_staleness": "[0, inf)",
    "rollout.concurrency": "[1, inf)",
    "rollout.request_timeout_s": "(0, inf)",
    "rollout.health_timeout_s": "(0, inf)",
    "rollout.gone_timeout_s": "(0, inf)",
    "rollout.attempts": "[1, inf)",
    "rollout.bucket_bytes": "[1, inf)",
    "rollout.probe_tolerance": "(0, inf)",
    "algorithm.gamma": "[0, 1]",
    "algorithm.lam": "[0, 1]",
    "algorithm.lam_alpha": "(0, inf)",
    "algorithm.value_lam": "[0, 1]",
    "algorithm.overlong_buffer": "[0, inf)",
    "algorithm.overlong_penalty": "[0, inf)",
    "algorithm.missing_eos_penalty": "[0, inf)",
    "algorithm.nll_coef": "[0, inf)",
    "algorithm.nll_above": "(-inf, inf)",
    "algorithm.rejection_low": "[0, inf)",
    "algorithm.rejection_high": "(0, inf)",
    "algorithm.clip_low": "(0, 1]",
    "algorithm.clip_high": "(0, inf)",
    "algorithm.dual_clip": "(1, inf)",
    "algorithm.value_clip": "(0, inf)",
    "algorithm.value_coef": "[0, inf)",
    "algorithm.entropy_coef": "[0, inf)",
    "algorithm.kl_coef": "[0, inf)",
    "algorithm.kl_target": "(0, inf)",
    "algorithm.kl_horizon": "[1, inf)",
    "algorithm.importance_cap": "(0, inf)",
    "algorithm.epochs": "[1, inf)",
    "algorithm.updates": "[1, inf)",
    "algorithm.max_skipped_in_a_row": "[1, inf)",
    "logprob.chunk_size": "[1, inf)",
    "packing.micro_batch_tokens": "[1, inf)",
    "eval.every": "[0, inf)",
    "eval.max_new_tokens": "[1, inf)",
    "eval.temperature": "[0, inf)",
    "checkpoint.every": "[0, inf)",
    "checkpoint.keep": "[1, inf)",
    "log.samples": "[0, inf)",
} | {
    f"optim.{tree}.{name}": allowed
    for tree in ("policy", "value")
    for name, allowed in {
        "lr": "[0, inf)",
        "warmup_steps": "[0, inf)",
        "min_lr_ratio": "[0, 1]",
        "beta1": "[0, 1)",
        "beta2": "[0, 1)",
        "eps": "(0, inf)",
        "weight_decay": "[0, inf)",
        "max_grad_norm": "[0, inf)",
    }.items()
}


def out_of_range(config: Config) -> Iterator[str]:
    """One message for each setting outside its range."""
    for key, interval in _RANGES.items():
        value: object = config
        for name in key.split("."):
            value = None if value is None else getattr(value, name)
        if isinstance(value, int | float) and not _inside(value, interval):
            extra = ""
            if key == "rollout.temperature":
                extra = "; greedy samples have no gradient (eval.temperature may be 0)"
            yield f"{key}={value} must lie in {interval}{extra}"
    for i, function in enumerate(config.reward.functions):
        if not math.isfinite(function.weight):
            yield f"reward.functions[{i}].weight={function.weight} must be finite"
    for token in config.rollout.stop_token_ids or ():
        if token < 0:
            yield f"rollout.stop_token_ids has {token}; token ids are at least 0"
    lengths = config.packing.row_lengths
    if not lengths or min(lengths) < 1 or sorted(set(lengths)) != lengths:
        yield f"packing.row_lengths={lengths} must be positive and rise, e.g. [256, 512, 1024]"
    sizes = {name: getattr(config.mesh, name) for name in ("data", "fsdp", "tensor")}
    for name, size in sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{name}={size} must be at least 1, or -1 for the devices that are left"
    if list(sizes.values()).count(-1) > 1:
        given = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
        yield f"{given}: at most one may be -1; give the others a number"


def _inside(value: float, interval: str) -> bool:
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    return above and (value < high or (value == high and interval[-1] == "]"))
