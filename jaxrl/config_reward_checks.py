"""Rules for the settings of `reward` and `critic`: who rewards, and where values start."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from jaxrl.config import Config, RewardConfig

__all__ = ["reward_rules"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def reward_rules(config: Config) -> Iterator[str]:
    """One message for each rule that is broken: the dotted key, its value, and the fix."""
    reward = config.reward
    if not (reward.functions or reward.models or reward.servers) and config.rollout.env is None:
        yield (
            "reward.functions is empty, and so are reward.models and reward.servers; name at least "
            "one, e.g. reward.functions='[{fn: jaxrl.reward_functions:last_number}]', or an "
            "environment that rewards in rollout.env"
        )
    yield from _functions(reward)
    yield from _models(reward)
    yield from _servers(reward)
    yield from _critic(config)


def _functions(reward: RewardConfig) -> Iterator[str]:
    names = [function.fn for function in reward.functions]
    for i, name in enumerate(names):
        if not _FUNCTION.fullmatch(name):
            yield f"reward.functions[{i}].fn={name!r} must read module:function"
        elif name in names[:i]:
            yield f"reward.functions[{i}].fn={name!r} is listed twice; list it once with one weight"


def _models(reward: RewardConfig) -> Iterator[str]:
    for i, model in enumerate(reward.models):
        key = f"reward.models[{i}]"
        if not model.path:
            yield f"{key}.path is not set; give the folder of a Hugging Face sequence classifier"
        elif any((model.path, model.chat) == (m.path, m.chat) for m in reward.models[:i]):
            yield f"{key}.path={model.path!r} is listed twice; list it once with one weight"
        if not math.isfinite(model.weight):
            yield f"{key}.weight={model.weight} must be finite"
        if model.max_tokens < 1:
            yield f"{key}.max_tokens={model.max_tokens} must be at least 1"
        if model.batch_tokens < model.max_tokens:
            yield (
                f"{key}.batch_tokens={model.batch_tokens} must hold a text of max_tokens="
                f"{model.max_tokens}; set it to at least that"
            )


def _servers(reward: RewardConfig) -> Iterator[str]:
    urls = [server.url for server in reward.servers]
    for i, server in enumerate(reward.servers):
        key = f"reward.servers[{i}]"
        if not _is_address(server.url):
            yield f"{key}.url={server.url!r} must read http://host:port/path"
        elif server.url in urls[:i]:
            yield f"{key}.url={server.url!r} is listed twice; list it once with one weight"
        if not math.isfinite(server.weight):
            yield f"{key}.weight={server.weight} must be finite"
        for name in ("batch_size", "concurrency", "attempts"):
            if getattr(server, name) < 1:
                yield f"{key}.{name}={getattr(server, name)} must be at least 1"
        if not 0 < server.timeout_s < math.inf:
            yield f"{key}.timeout_s={server.timeout_s} must lie in (0, inf)"


def _is_address(url: str) -> bool:
    """Whether a request can be sent there: scheme, host, perhaps port, path and query."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or beyond 65535
        return False
    return known and not parts.fragment and not re.search(r"\s", url)


def _critic(config: Config) -> Iterator[str]:
    critic = config.critic
    if critic.kind == "head" and critic.path is not None:
        yield f"critic.path={critic.path!r} is read for critic.kind=model only; set it to null"
    if critic.keep_head and (critic.kind != "model" or critic.path is None):
        yield (
            "critic.keep_head=true needs a reward model or critic whose head could be kept: set "
            "critic.kind=model and critic.path to its folder, or this to false"
        )
    if critic.kind == "model" and not critic.trunk_gradient:
        yield "critic.trunk_gradient=false concerns critic.kind=head only; set it to true"
    if critic.warmup_iterations and not config.needs_critic:
        yield (
            f"critic.warmup_iterations={critic.warmup_iterations} needs a critic, which "
            f"algorithm.advantage_mode={config.algorithm.advantage_mode} has not; set it to 0"
        )
    elif critic.warmup_iterations >= config.iterations:
        yield (
            f"critic.warmup_iterations={critic.warmup_iterations} must be less than "
            f"iterations={config.iterations}, or the policy is never trained"
        )
