"""Which settings of `algorithm` can stand together."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl.config import AlgorithmConfig, Config

__all__ = ["algorithm_rules"]

_OFF = AlgorithmConfig()


def algorithm_rules(config: Config) -> Iterator[str]:
    """One message for each rule that is broken, with the fix."""
    yield from _unread(config)
    yield from _advantages(config)
    yield from _endings(config)
    yield from _ratios(config)
    yield from _penalty(config)
    yield from _off_policy(config)


def _unread(config: Config) -> Iterator[str]:
    """Settings that another one makes idle: whoever sets them expects them to do something."""
    algorithm = config.algorithm
    gae, soft = algorithm.advantage_mode == "gae", algorithm.truncated == "soft"
    readers = {
        "lam_alpha": (gae, "advantage_mode=gae"),
        "value_lam": (gae, "advantage_mode=gae"),
        "group_scale": (algorithm.advantage_mode == "grpo", "advantage_mode=grpo"),
        "gae_over": (algorithm.advantage_mode != "grpo", "advantage_mode gae or returns"),
        "overlong_buffer": (soft, "truncated=soft"),
        "overlong_penalty": (soft, "truncated=soft"),
        "nll_above": (algorithm.nll_coef > 0, "nll_coef above 0"),
        "kl_weighted": (algorithm.kl_in == "loss", "kl_in=loss"),
        "importance_cap": (algorithm.importance != "off", "importance token or sequence"),
        "rejection_low": (algorithm.rejection != "off", "rejection other than off"),
        "rejection_high": (algorithm.rejection != "off", "rejection other than off"),
    }
    for name, (is_read, where) in readers.items():
        value, off = getattr(algorithm, name), getattr(_OFF, name)
        if value != off and not is_read:
            shown = "null" if off is None else str(off).lower() if off is False else off
            yield f"algorithm.{name}={value} is read with {where} only; set it to {shown}"


def _advantages(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.whitening == "group" and config.rollout.samples < 2:
        yield (
            "algorithm.whiten=group with rollout.samples=1 compares the tokens of one response; "
            "set rollout.samples to at least 2, or whiten=batch"
        )


def _endings(config: Config) -> Iterator[str]:
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    if algorithm.truncated == "bootstrap" and algorithm.advantage_mode != "gae":
        yield (
            "algorithm.truncated=bootstrap takes the value of a state, which "
            f"advantage_mode={algorithm.advantage_mode} has no critic for; set truncated to keep, "
            "zero, soft or mask, or advantage_mode=gae"
        )
    if algorithm.truncated == "soft" and not 1 <= algorithm.overlong_buffer <= longest:
        yield (
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} must lie in [1, {longest}] "
            "(rollout.max_new_tokens) with truncated=soft: so many tokens before the limit the "
            "penalty begins"
        )
    if algorithm.truncated == "mask" and algorithm.missing_eos_penalty:
        yield (
            f"algorithm.missing_eos_penalty={algorithm.missing_eos_penalty} is for truncated "
            "responses, which truncated=mask takes out; set it to 0"
        )


def _ratios(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.rejection != "off" and algorithm.rejection_low >= algorithm.rejection_high:
        yield (
            f"algorithm.rejection_low={algorithm.rejection_low} must be below "
            f"rejection_high={algorithm.rejection_high}, or nothing is kept"
        )
    elif algorithm.rejection != "off" and not (
        algorithm.rejection_low <= 1 <= algorithm.rejection_high
    ):
        yield (
            f"algorithm.rejection_low={algorithm.rejection_low} and "
            f"rejection_high={algorithm.rejection_high} reject samples of the policy itself, whose "
            "ratio is 1; put 1 between them"
        )


def _penalty(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_target is not None and algorithm.kl_in != "reward":
        yield (
            f"algorithm.kl_target={algorithm.kl_target} adapts the penalty in the reward, but "
            f"algorithm.kl_in={algorithm.kl_in}; set kl_in=reward, or kl_target=null"
        )
    elif algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield "algorithm.kl_coef=0 stays 0 however it adapts to kl_target; start above 0"
    if algorithm.kl_in == "loss" and algorithm.kl_kind == "k1" and not algorithm.kl_weighted:
        yield (
            "algorithm.kl_kind=k1 has a gradient of zero on average in the loss; with "
            "algorithm.kl_in=loss set kl_weighted=true, or kl_kind to k2 (or k3, abs)"
        )


def _off_policy(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.old_logprobs == "rollout" and algorithm.importance != "off":
        yield (
            f"algorithm.importance={algorithm.importance} weighs the trainer's old "
            "log-probabilities against the sampler's, which algorithm.old_logprobs=rollout makes "
            "the same; set importance=off, or old_logprobs=trainer"
        )
    uncorrected = algorithm.old_logprobs == "trainer" and algorithm.importance == "off"
    if rollout.engine == "sglang" and rollout.max_staleness and uncorrected:
        yield (
            f"rollout.max_staleness={rollout.max_staleness} trains on samples of older weights; "
            "set algorithm.importance to token or sequence, or algorithm.old_logprobs=rollout, to "
            "account for that"
        )
