"""YAML files and ``key.sub=value`` in, a `Config` out, and back; the only user of OmegaConf.

Files are layered left to right, overrides come last. Sections merge; lists and free mappings
(``data.train.params``) are replaced as a whole. ``${run_dir}/base`` refers to another setting.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from jaxrl.config import Config
from jaxrl.config_schema import check_layer, describe, field_types, section_of, type_at
from jaxrl.errors import ConfigError

__all__ = ["config_to_dict", "config_to_yaml", "describe", "load_config", "save_config"]

_KEY = re.compile(r"[^.\[\]]+(\[[0-9]+\])*(\.[^.\[\]]+(\[[0-9]+\])*)*")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_SCALARS = (  # YAML 1.2's core schema: `off` is a word, 010 is ten, 1e-5 is a number; order matters
    ("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+"), "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+.0123456789"),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader without YAML 1.1's surprises, that refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, ((key, _), name) in enumerate(zip(node.value, names, strict=True)):
            if name in names[:i]:
                problem = f"{name!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever either YAML version would not read as text."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern, _first in _SCALARS:
    _whole = re.compile(rf"(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(_tag, _whole, list(_first))
    _Dumper.add_implicit_resolver(_tag, _whole, list(_first))


def load_config(
    files: Sequence[str | os.PathLike[str]] = (), overrides: Sequence[str] = ()
) -> Config:
    """Defaults, then `files` left to right, then `overrides` left to right.

    Args:
        files: YAML files.
        overrides: ``key.sub=value``, the value written as in YAML; ``reward.functions[0].weight=2``
            reaches into a list.

    Raises:
        ConfigError: An unknown key, a wrong type, a file that is missing or is not YAML; with the
            dotted key, the value given, and what is allowed. `config_checks` holds all other rules.
    """
    merged = dataclasses.asdict(Config())
    for file in files:
        _merge(merged, check_layer(_read(Path(file)), where=f"{file}: "), Config)
    for override in overrides:
        _override(merged, override)
    return _build(merged)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dicts and lists."""
    return dataclasses.asdict(config)


def config_to_yaml(config: Config) -> str:
    """Every setting, resolved, nulls kept; `load_config` makes an equal `Config` of it."""
    plain = _escape(config_to_dict(config))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write `config_to_yaml` to `path`, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(config_to_yaml(config), encoding="utf-8")
    partial.replace(path)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a settings file ({error})") from error
    value = _parse(text, f"{path}: ")
    if value is None:
        raise ConfigError(f"{path}: holds no settings; write some, or leave the file out")
    return value


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}not valid YAML: {' '.join(str(error).split())}") from error


def _override(merged: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(
            f"{override!r} is not an override; write key.sub=value, e.g. algorithm.lam=0.9 "
            "or reward.functions[0].weight=2"
        )
    parts = re.findall(r"([^.\[\]]+)(?!\])|\[([0-9]+)\]", key)
    path: list[str | int] = [int(index) if index else name for name, index in parts]
    kind = type_at(path, "")
    if not text.strip():
        raise ConfigError(
            f"{override!r} has no value; write {key}=null for none or {key}='\"\"' for no text"
        )
    value = check_layer(_parse(text, f"{key}: "), kind, key)
    place: Any = merged
    for part in path[:-1]:
        _must_hold(place, part, key)
        if isinstance(part, str) and place.get(part) is None:
            place[part] = {}  # an optional section that was null, or a new mapping
        place = place[part]
    last = path[-1]
    _must_hold(place, last, key)
    section = section_of(kind)
    if section is not None and isinstance(value, dict) and isinstance(place[last], dict):
        _merge(place[last], value, section)
    else:
        place[last] = value


def _must_hold(place: Any, part: str | int, key: str) -> None:
    if isinstance(place, str) and "${" in place:
        raise ConfigError(f"{key}: the section is {place!r}; set the key where that refers to")
    if not isinstance(place, dict if isinstance(part, str) else list):
        raise ConfigError(f"{key}: {place!r} is there, which has no {part!r} in it")
    if isinstance(part, int) and part >= len(place):
        raise ConfigError(f"{key}: the list has {len(place)} entries, so there is no [{part}]")


def _merge(base: dict[str, Any], layer: dict[str, Any], cls: type) -> None:
    """Put `layer` over `base`: sections key by key, everything else as a whole."""
    for name, value in layer.items():
        section = section_of(field_types(cls)[name])
        if section is not None and isinstance(value, dict) and isinstance(base[name], dict):
            _merge(base[name], value, section)
        else:
            base[name] = copy.deepcopy(value)


def _build(merged: dict[str, Any]) -> Config:
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), merged)
        return cast(Config, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the settings"
        reason = str(error).split("\n")[0]
        if isinstance(error, GrammarParseError):
            reason = "not a reference; write ${section.key}"
        raise ConfigError(f"{key}: {reason}; write the value, or correct the ${{...}}") from error


def _escape(value: Any) -> Any:
    """Text that holds ``${`` must not be taken for a reference when it is read again."""
    if isinstance(value, dict):
        return {name: _escape(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_escape(entry) for entry in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value
