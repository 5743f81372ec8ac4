"""The arrows between the rooms: read from the imports, and seen in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl"

# A room imports from its own layer and the ones before it. Rooms not named here belong to the
# outside world: files, processes, servers, and what a person sees.
LAYERS = {
    "vocabulary": {"types", "errors", "config"},
    "maths": {
        "checks",
        "segments",
        "reduce",
        "head_inputs",
        "head_split",
        "vocab_blocks",
        "logprobs",
        "groups",
        "advantages",
        "ratios",
        "losses",
        "rewards",
    },
    "models and placement": {"models", "sharding", "optim"},
    "pure steps": {
        "planning",
        "packing",
        "critic",
        "steps",
        "advantage_step",
        "micro_losses",
        "update",
    },
    "outside world": set(),
    "trainer": {
        "setup",
        "evaluation",
        "iteration",
        "saving",
        "trainer",
        "commands",
        "compare",
        "planner",
    },
}
ORDER = list(LAYERS)
MATHS = sorted(LAYERS["maths"])

# Where a heavy library may be imported; everything else in the package must do without.
HOMES = {
    "flax": ("models/",),
    "orbax": ("checkpoint/arrays.py",),
    "tensorstore": ("checkpoint/stream.py",),
    "safetensors": ("checkpoint/hf",),
    "omegaconf": ("config_io.py",),
    "httpx": ("http_client.py",),
    "torch": (),
}
HEAVY = (*HOMES, "optax", "transformers", "datasets", "matplotlib", "rich")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that `source` imports, at any depth, relative ones resolved in `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            yield stem
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(path.read_text(encoding="utf-8"), path.parent.relative_to(ROOT).parts))


def room(name: str) -> str | None:
    """The room of a dotted jaxrl name; None for other packages and for jaxrl itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "jaxrl" and len(parts) > 1 else None


def layer(room: str) -> int:
    named = (i for i, rooms in enumerate(LAYERS.values()) if room in rooms)
    return next(named, ORDER.index("outside world"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def own_room(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


ROOMS = {own_room(p) for p in modules()} - {"__init__"}


def test_every_room_of_the_table_exists() -> None:
    assert set().union(*LAYERS.values()) <= ROOMS


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_arrows_point_one_way(path: Path) -> None:
    own = "losses" if own_room(path) == "__init__" else own_room(path)
    used = {r for n in imports_of(path) if (r := room(n)) and r in ROOMS}
    later = {f"{r} ({ORDER[layer(r)]})" for r in used if layer(r) > layer(own)}
    assert not later, f"{relative(path)} ({ORDER[layer(own)]}) imports from {sorted(later)}"


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_heavy_libraries_stay_in_their_rooms(path: Path) -> None:
    used = {name.split(".")[0] for name in imports_of(path)}
    homeless = {
        lib for lib, homes in HOMES.items() if lib in used and not relative(path).startswith(homes)
    }
    assert not homeless, f"{relative(path)} imports {sorted(homeless)}"


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_needs_jax_and_itself_alone(name: str) -> None:
    used = imports_of(PACKAGE / f"{name}.py")
    outside = {n.split(".")[0] for n in used} - set(sys.stdlib_module_names)
    assert outside <= {"jax", "numpy", "jaxtyping", "jaxrl"}
    assert "config" not in {room(n) for n in used}


@pytest.mark.parametrize(
    ("source", "package", "name", "found"),
    [
        ("def f():\n    import flax.linen as nn", ("jaxrl",), "flax.linen", None),
        ("from jaxrl import trainer", ("jaxrl",), "jaxrl.trainer", "trainer"),
        ("from . import steps", ("jaxrl",), "jaxrl.steps", "steps"),
        (
            "from ..rollout.engine import Engine",
            ("jaxrl", "models"),
            "jaxrl.rollout.engine",
            "rollout",
        ),
        ("if TYPE_CHECKING:\n    import torch", ("jaxrl",), "torch", None),
    ],
)
def test_no_import_goes_unseen(source: str, package: tuple, name: str, found: str | None) -> None:
    assert name in set(imports(source, package))
    assert room(name) == found


def test_importing_the_maths_loads_nothing_heavier_than_jax() -> None:
    names = ", ".join(f"jaxrl.{m}" for m in MATHS)
    code = f"import sys, jaxrl, {names}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == []
