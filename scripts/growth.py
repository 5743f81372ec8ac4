"""How time and memory grow with row length, vocabulary, batch and devices; writes docs/growth.png.

    python scripts/growth.py                 # measures what docs/growth.json lacks, then draws
    python scripts/growth.py --again         # everything anew
    python scripts/growth.py --only vocabulary

Lengths, vocabularies and batches: a gradient compiled and run on this machine's CPU; CPU seconds of
one call after a first one, and XLA's temporaries, beside which are arguments and gradients.
Devices: the planner's estimate of what one of them holds, for a recipe's policy update.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from bench_inputs import Sizes, model_config
from bench_sections import head_section
from bench_timing import Work

from jaxrl.config_io import load_config
from jaxrl.models import Model, ModelConfig
from jaxrl.planner import find_model, parse_target, plan_run
from jaxrl.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
KEPT, PICTURE = ROOT / "docs" / "growth.json", ROOT / "docs" / "growth.png"
TRUNK = Sizes(layers=2, hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
SEGMENT = 1024
Point = dict[str, float]


def trunk(rows: int, length: int, segment: int) -> Work:
    """Gradient of the layers for rows of `length` tokens, in segments of that many."""
    model = Model(ModelConfig.from_hf(model_config(TRUNK)), remat="attention")
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (rows, length)), jnp.int32)
    columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    segments, positions = columns // segment + 1, columns % segment

    def loss(params: Any) -> jax.Array:
        return jnp.square(model.hidden(params, tokens, positions, segments)).mean()

    program = jax.jit(jax.grad(loss)).lower(params).compile()
    memory = program.memory_analysis()
    temp = memory.temp_size_in_bytes if memory else 0
    return Work(lambda: program(params), temp, lambda _: {}, tokens.size)


def head(vocab: int) -> Work:
    """Gradient of the log-probability head, 4096 tokens of width 256."""
    return head_section(replace(Sizes(), vocab=vocab), gradient=True, entropy=False)


def measured(work: Work, *, run: bool) -> Point:
    """MiB of temporaries, and the CPU seconds of a second call."""
    point = {"MiB": work.temp_bytes / 2**20}
    if run:
        jax.block_until_ready(work.call())
        began = time.process_time()
        jax.block_until_ready(work.call())
        point["s"] = time.process_time() - began
    return point


def planned(devices: int) -> Point:
    """GiB of one of so many H100s in the policy update of Qwen3-4B, a row of 10240 tokens each."""
    overrides = [
        "model.path=models/Qwen3-4B-Base", f"mesh.fsdp={devices}",
        f"packing.micro_batch_tokens={10240 * devices}",
    ]  # fmt: skip
    config = load_config([ROOT / "configs" / "qwen3_4b_dapo_sglang.yaml"], overrides)
    file = ROOT / "configs" / "models" / "Qwen3-4B-Base.json"
    name, model = find_model(config, file, file.parent)
    plan = plan_run(config, model, parse_target(f"analytic:h100:{devices}"), name=name)
    update = next(step for step in plan.steps if step.step == "update")
    return {"GiB": update.needed / 2**30}


def doubling(first: int, last: int) -> list[int]:
    """From first to last, each twice the one before."""
    return [first << i for i in range((last // first).bit_length())]


CURVES: Mapping[str, tuple[str, Mapping[int, Callable[[], Point]]]] = {
    "length": (
        "tokens of a row, one segment (2 layers of width 64)",
        {n: lambda n=n: measured(trunk(1, n, n), run=n <= 32768) for n in doubling(1024, 65536)},
    ),
    "packed": (
        f"tokens of a row, segments of {SEGMENT}",
        {n: lambda n=n: measured(trunk(1, n, SEGMENT), run=True) for n in doubling(1024, 65536)},
    ),
    "vocabulary": (
        "columns of the head (4096 tokens of width 256)",
        {n: lambda n=n: measured(head(n), run=True) for n in doubling(8192, 262144)},
    ),
    "batch": (
        "rows of 1024 tokens (2 layers of width 64)",
        {n: lambda n=n: measured(trunk(n, SEGMENT, SEGMENT), run=True) for n in doubling(1, 64)},
    ),
    "devices": (
        "H100s that share the update of Qwen3-4B, a row each",
        {n: lambda n=n: planned(n) for n in doubling(4, 256)},
    ),
}


def draw(kept: Mapping[str, Mapping[str, Point]]) -> None:
    """A row of pictures: memory above time, doubly logarithmic, beside lines of proportion."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in CURVES if kept.get(name)]
    figure, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6), squeeze=False)
    for column, name in enumerate(names):
        points = sorted((int(x), point) for x, point in kept[name].items())
        for row, units in enumerate((("MiB", "GiB"), ("s",))):
            axis = axes[row][column]
            unit = next((unit for unit in units if unit in points[0][1]), None)
            found = [(x, point[unit]) for x, point in points if unit in point]
            if not found:
                axis.axis("off")
                continue
            xs, ys = np.array(found).T
            axis.loglog(xs, ys, "o-", base=2)
            power = -1 if name == "devices" else 1
            axis.loglog(xs, ys[-1] * (xs / xs[-1]) ** power, ":", base=2, color="grey")
            axis.set_title(f"{name}: {'CPU s' if unit == 's' else unit}", fontsize=9)
            axis.set_xlabel(CURVES[name][0], fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def table(kept: Mapping[str, Mapping[str, Point]]) -> str:
    """Every point, a line a curve."""
    lines = []
    for name, points in kept.items():
        cells = [
            f"{x}: " + " ".join(f"{value:.3g} {unit}" for unit, value in points[x].items())
            for x in sorted(points, key=int)
        ]
        lines.append(f"{name} ({CURVES[name][0]})\n    " + ", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measure, keep, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="measure what is kept, too")
    parser.add_argument("--only", nargs="+", choices=CURVES, help="some of the curves")
    options = parser.parse_args()
    report: dict[str, Any] = {"curves": {}}
    if KEPT.exists():
        report = json.loads(KEPT.read_text(encoding="utf-8"))
    report |= provenance()
    for name in options.only or CURVES:
        points = report["curves"].setdefault(name, {})
        for x, measure in CURVES[name][1].items():
            if str(x) not in points or options.again:
                points[str(x)] = measure()
                KEPT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                print(name, x, points[str(x)], flush=True)
    draw(report["curves"])
    print(table(report["curves"]))


if __name__ == "__main__":
    main()
