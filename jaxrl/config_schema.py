"""What a settings file may hold, read off the dataclasses of `config`: keys, types, docstrings.

`check_layer` makes one file's settings (or one ``key=value``) safe to merge; `settings` and
`describe` list every key for ``--help``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from jaxrl import config as _config
from jaxrl.config import Config
from jaxrl.errors import ConfigError

__all__ = ["Setting", "check_layer", "describe", "field_types", "section_of", "settings", "type_at"]

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key that a person can set."""

    key: str
    """Dotted name."""
    allowed: str
    """What it may hold, in words."""
    default: Any
    doc: str


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a settings dataclass."""
    return typing.get_type_hints(cls)


def section_of(kind: Any) -> type | None:
    """The settings dataclass behind ``Section`` or ``Section | None``; None for anything else."""
    kind, _ = _without_none(kind)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def type_at(path: list[str | int], where: str) -> Any:
    """Type of the setting at `path`, e.g. ``["reward", "functions", 0, "weight"]`` -> float.

    Raises:
        ConfigError: There is no such setting; the message has the nearest one.
    """
    kind: Any = Config
    for depth, part in enumerate(path):
        kind, _ = _without_none(kind)
        key = _dotted(path[:depth])
        if section := section_of(kind):
            if part not in field_types(section):
                raise ConfigError(_unknown(key, str(part), section, where))
            kind = field_types(section)[str(part)]
        elif typing.get_origin(kind) is list and isinstance(part, int):
            kind = typing.get_args(kind)[0]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif kind is Any:
            return Any
        else:
            hint = "; an entry is reached as [0]" if typing.get_origin(kind) is list else ""
            raise ConfigError(f"{where}{key} is {_words(kind)}, so it has no {part!r} in it{hint}")
    return kind


def check_layer(value: Any, kind: Any = Config, key: str = "", where: str = "") -> Any:
    """`value` with every key known and every type right, ready to merge.

    Args:
        value: Plain data as YAML gives it.
        kind: The type it must have.
        key: Dotted name of the place, for messages.
        where: Prefix of messages, e.g. the file's name.

    Raises:
        ConfigError: Naming the key, the value given, what is allowed, and the nearest key.
    """
    kind, optional = _without_none(kind)
    if kind is Any or (isinstance(value, str) and "${" in value):
        return value  # an interpolation is checked once it is resolved
    if value is None and optional:
        return None
    if value is None:
        raise ConfigError(f"{where}{key or 'the file'} is empty (null) but must be {_words(kind)}")
    if section := section_of(kind):
        return _check_section(value, section, key, where)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}{key}={value!r} must be {_words(kind)}, e.g. [a, b]")
        item = typing.get_args(kind)[0]
        return [check_layer(v, item, f"{key}[{i}]", where) for i, v in enumerate(value)]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{where}{key}={value!r} must be {_words(kind)}: {{name: value}}")
        return value
    return _check_scalar(value, kind, key, where)


def _check_section(value: Any, kind: type, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}{key or 'the file'}={value!r} must be a section with the keys "
            f"{', '.join(field_types(kind))}"
        )
    checked = {}
    for name, entry in value.items():
        if name not in field_types(kind):
            raise ConfigError(_unknown(key, str(name), kind, where))
        inner = f"{key}.{name}" if key else name
        checked[name] = check_layer(entry, field_types(kind)[name], inner, where)
    return checked


def _check_scalar(value: Any, kind: Any, key: str, where: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        if value in typing.get_args(kind):
            return value
    elif kind is bool and isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif type(value) is kind and value != "???":  # OmegaConf reads ??? as "not given"
        return value
    hint = ""
    if kind is str and not isinstance(value, list | dict | str):
        hint = "; put it in quotes to mean the text"
    elif kind is int and isinstance(value, float):
        hint = f"; write {value:.0f}" if value.is_integer() else "; it is not rounded for you"
    elif typing.get_origin(kind) is typing.Literal:
        nearest = difflib.get_close_matches(str(value), typing.get_args(kind), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"{where}{key}={value!r} must be {_words(kind)}{hint}")


def _unknown(section: str, name: str, kind: type, where: str) -> str:
    """Message for a key that does not exist, with the likeliest one meant."""
    prefix = f"{section}." if section else ""
    guesses = [prefix + key for key in _near(name, field_types(kind))] or _anywhere(name)
    guess = f"did you mean {' or '.join(guesses)}? " if guesses else ""
    has = f"{section or 'the top level'} has {', '.join(field_types(kind))}"
    return f"{where}{prefix}{name} is not a setting; {guess}{has}"


def _near(name: str, keys: Iterable[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name.replace("-", "_").lower(), list(keys), 1, cutoff)


def _anywhere(name: str) -> list[str]:
    """Keys of any section called nearly `name`, or else described by its words."""
    by_leaf: dict[str, list[str]] = {}
    for setting in settings():
        by_leaf.setdefault(setting.key.rsplit(".", 1)[-1], []).append(setting.key)
    if near := _near(name, by_leaf):
        return by_leaf[near[0]]
    words = name.replace("-", "_").lower().split("_")
    if len(words) == 1:
        return []  # a single word turns up in too many docstrings
    docs = {s.key: s.doc.lower().rstrip(".").split() for s in settings()}
    return [key for key, doc in docs.items() if all(_near(word, doc, 0.85) for word in words)][:2]


def settings() -> tuple[Setting, ...]:
    """Every key with its default and its docstring, in the order of `config`."""
    return tuple(_walk(Config(), "", _docs()))


def describe() -> str:
    """The table of all settings that ``--help`` prints."""
    lines = []
    for setting in settings():
        lines.append(f"{setting.key} = {_shown(setting.default)}   ({setting.allowed})")
        lines.append(f"    {setting.doc}")
    return "\n".join(lines)


def _walk(section: Any, prefix: str, docs: dict[tuple[str, str], str]) -> Iterator[Setting]:
    for name, declared in field_types(type(section)).items():
        default, key = getattr(section, name), prefix + name
        kind, optional = _without_none(declared)
        if section_of(kind) and not optional:
            yield from _walk(default, f"{key}.", docs)
            continue
        yield Setting(
            key=key,
            allowed=_words(kind) + (", or null" if optional else ""),
            default=default,
            doc=docs.get((type(section).__name__, name), ""),
        )
        if typing.get_origin(kind) is list and (entry := section_of(typing.get_args(kind)[0])):
            yield from _walk(entry(), f"{key}[i].", docs)
        elif inner := section_of(kind):
            yield from _walk(inner(), f"{key}.", docs)


def _docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the string written below the field in `config`."""
    found = {}
    for name in _config.__all__:
        (cls,) = ast.parse(inspect.getsource(getattr(_config, name))).body
        assert isinstance(cls, ast.ClassDef)
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[name, field.target.id] = " ".join(str(text.value.value).split())
    return found


def _without_none(kind: Any) -> tuple[Any, bool]:
    """``X | None`` -> (X, True); anything else -> (it, False)."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return rest[0], True
    return kind, False


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        item = typing.get_args(kind)[0]
        return f"a list of {'section' if section_of(item) else item.__name__}s"
    if typing.get_origin(kind) is dict:
        return "a mapping with string keys"
    return "a section" if dataclasses.is_dataclass(kind) else _NAMES.get(kind, "any value")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else str(value)


def _dotted(path: list[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
