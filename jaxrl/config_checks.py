"""What must hold of a `Config` as a whole: values in range, nothing that cannot stand together.

All of it is plain arithmetic on the `Config`, so a run that cannot work stops before anything is
loaded or compiled. Rules that need the model, the data or the devices live with those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from jaxrl.config import Config, RolloutConfig, SourceConfig
from jaxrl.config_algorithm_checks import algorithm_rules
from jaxrl.config_ranges import out_of_range
from jaxrl.config_reward_checks import reward_rules
from jaxrl.config_rollout_checks import rollout_rules
from jaxrl.config_running_checks import running_rules
from jaxrl.errors import ConfigError

__all__ = ["check_config"]

_URL = re.compile(r"https?://[^/\s]+(:\d+)?/?")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def check_config(config: Config) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: One line for each rule that is broken: the dotted key, its value, and the fix.
    """
    # A later rule may divide by, or count with, what is out of range.
    for rules in (out_of_range, _combinations):
        problems = list(rules(config))
        if problems:
            raise ConfigError("\n".join(problems))


def _combinations(config: Config) -> Iterator[str]:
    rules: tuple[Callable[[Config], Iterator[str]], ...] = (
        _required,
        reward_rules,
        rollout_rules,
        _data,
        _batch,
        _rows,
        _sampling,
        _servers,
        algorithm_rules,
        _schedules,
        running_rules,
    )
    for rule in rules:
        yield from rule(config)


def _required(config: Config) -> Iterator[str]:
    if not config.model.path:
        yield "model.path is not set; give the folder of a Hugging Face causal language model"
    if not config.run_dir:
        yield "run_dir is empty; give the folder the run writes to"
    if config.model.make is not None and not _FUNCTION.fullmatch(config.model.make):
        yield f"model.make={config.model.make!r} must read module:function"


def _data(config: Config) -> Iterator[str]:
    yield from _source(config.data.train, "data.train")
    if config.data.eval is not None:
        yield from _source(config.data.eval, "data.eval")
    if config.data.system is not None and not config.data.chat:
        yield "data.system needs data.chat=true: without a chat template it would go nowhere"


def _source(source: SourceConfig, key: str) -> Iterator[str]:
    needed = {"file": ("path",), "reasoning_gym": ("name", "size"), "python": ("name",)}[
        source.kind
    ]
    read = {
        "file": ("path", "split", "size"),
        "reasoning_gym": ("name", "params", "size", "seed"),
        "python": ("name", "params", "size"),
    }[source.kind]
    for name in needed:
        if not getattr(source, name):
            yield f"{key}.{name} is not set; {key}.kind={source.kind} needs it"
    for name in ("path", "split", "name", "params", "seed"):
        value = getattr(source, name)
        if value and name not in read:
            off = json.dumps(getattr(SourceConfig(), name))
            hint = f" (a function takes its own in {key}.params)" if name == "seed" else ""
            yield (
                f"{key}.{name}={value!r} is not read when {key}.kind={source.kind}; "
                f"set it to {off}{hint}"
            )
    if source.kind == "python" and source.name and not _FUNCTION.fullmatch(source.name):
        yield f"{key}.name={source.name!r} must read module:function"


def _batch(config: Config) -> Iterator[str]:
    count, updates = config.trajectories, config.algorithm.updates
    if count % updates:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        yield (
            f"algorithm.updates={updates} must divide the {count} completions of an iteration "
            f"(rollout.prompts * rollout.samples); set algorithm.updates to one of {fitting}"
        )
    if config.algorithm.advantage_mode == "grpo" and config.rollout.samples < 2:
        yield (
            "rollout.samples=1 leaves nothing to compare within a group; "
            "algorithm.advantage_mode=grpo needs at least 2"
        )


def _rows(config: Config) -> Iterator[str]:
    longest = f"data.max_prompt_tokens + rollout.max_new_tokens = {config.max_tokens}"
    fitting = [length for length in config.packing.row_lengths if length >= config.max_tokens]
    if not fitting:
        yield (
            f"packing.row_lengths={config.packing.row_lengths} has no row for a trajectory of "
            f"{longest} tokens; add a length of at least {config.max_tokens}"
        )
        return
    shards = (
        config.mesh.data * config.mesh.fsdp if -1 not in (config.mesh.data, config.mesh.fsdp) else 1
    )
    if config.packing.micro_batch_tokens < fitting[0] * shards:
        each = f" on each of {shards} shards (mesh.data * mesh.fsdp)" if shards > 1 else ""
        yield (
            f"packing.micro_batch_tokens={config.packing.micro_batch_tokens} must hold a row of "
            f"{fitting[0]} tokens{each}, which a trajectory of {longest} may need; set it to at "
            f"least {fitting[0] * shards}"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    filters = {
        "top_k": (rollout.top_k, 0),
        "top_p": (rollout.top_p, 1),
        "min_p": (rollout.min_p, 0),
    }
    for name, (value, off) in filters.items():
        if value == off:
            continue
        if rollout.engine == "sglang":
            yield (
                f"rollout.{name}={value}: SGLang's log-probabilities know nothing of filters, so "
                f"nothing could correct for them; set rollout.{name}={off}"
            )
        elif config.algorithm.importance == "off":
            yield (
                f"rollout.{name}={value} samples from another distribution than the one trained; "
                f"set rollout.{name}={off}, or algorithm.importance to token or sequence"
            )


def _servers(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "trainside":
        off = RolloutConfig()
        for name in ("urls", "router", "launch", "publish_dir", "colocated", "max_staleness"):
            value = getattr(rollout, name)
            if value != getattr(off, name):
                yield (
                    f"rollout.{name}={value!r} is read for rollout.engine=sglang only; "
                    f"set it to {json.dumps(getattr(off, name))}"
                )
        return
    if not rollout.urls:
        yield (
            "rollout.urls is empty; rollout.engine=sglang needs the address of every server, "
            "e.g. rollout.urls='[http://127.0.0.1:30000]'"
        )
    for url in (*rollout.urls, *([rollout.router] if rollout.router is not None else [])):
        if not _URL.fullmatch(url):
            yield f"rollout.urls: {url!r} must read http://host:port"
    if len(set(rollout.urls)) < len(rollout.urls):
        yield f"rollout.urls={rollout.urls} names a server twice; list each once"
    if rollout.colocated and rollout.max_staleness:
        yield (
            f"rollout.max_staleness={rollout.max_staleness} generates while the trainer works, "
            "which rollout.colocated=true cannot; set one of them off"
        )
    if rollout.publish_dir is not None and rollout.publish != "disk":
        yield (
            f"rollout.publish_dir={rollout.publish_dir!r} is read for rollout.publish=disk only; "
            "set it to null"
        )


def _schedules(config: Config) -> Iterator[str]:
    for tree in ("policy", "value"):
        steps = getattr(config.optim, tree).warmup_steps
        if steps > config.optimizer_steps:
            yield (
                f"optim.{tree}.warmup_steps={steps} must be at most the {config.optimizer_steps} "
                "optimizer steps of the run (iterations * algorithm.epochs * algorithm.updates)"
            )
