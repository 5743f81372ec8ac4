"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxrl.planner.memory import StepMemory, Verdict

__all__ = ["plan_text"]

_GIB = 2**30


def plan_text(verdict: Verdict) -> str:
    """Every figure of the verdict, and the verdict."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    sizes, layout = verdict.mesh, verdict.layout
    yield (
        f"{verdict.model}, {verdict.parameters:,} parameters, on {verdict.target}: "
        + ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    )
    yield (
        f"longest batch: {layout['updates']} updates of at most {layout['micros']} micro-batches "
        f"of {layout['rows']} rows of {layout['row_length']} tokens, {layout['policy_length']} "
        "of them the policy's"
    )
    yield ""
    yield "lies on each device, exact, GiB"
    yield from _sizes(verdict.held)
    yield ""
    yield "needed on each device, GiB"
    yield (
        f"  {'':8s}{'read':>8s}{'temporary':>11s}{'peak':>8s}{'beside':>8s}{'other':>7s}{'all':>8s}"
    )
    for step in verdict.steps:
        yield from _step(step)
    yield ""
    yield "on each host, estimated, GiB"
    yield from _sizes(verdict.host)
    yield ""
    yield from _work(verdict)
    yield ""
    words = {True: "fits", False: "does not fit", None: "no verdict"}
    yield f"{words[verdict.fits]}: {verdict.reason}"
    for remedy in verdict.remedies:
        would = "would fit" if remedy.fits else "would still not fit"
        yield (
            f"  {would} with {' '.join(remedy.overrides)}: {remedy.needed / _GIB:.2f} GiB "
            f"({remedy.cost})"
        )
    yield "versions: " + ", ".join(f"{name} {v}" for name, v in verdict.versions.items())


def _sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        if size:
            yield f"  {name:28s}{size / _GIB:9.3f}"
    yield f"  {'together':28s}{sum(sizes.values()) / _GIB:9.3f}"


def _step(step: StepMemory) -> Iterator[str]:
    if step.refused:
        yield f"  {step.step:8s}refused by the compiler"
        return
    columns = (step.arguments, step.temporaries, step.peak, step.beside, step.allowance)
    a, t, p, b, o = (size / _GIB for size in columns)
    every = step.needed / _GIB
    source = "estimate" if step.source == "estimate" else f"compiled, {step.seconds:.0f} s"
    yield f"  {step.step:8s}{a:8.3f}{t:11.3f}{p:8.3f}{b:8.3f}{o:7.2f}{every:8.3f}  {source}"
    for name, size in step.parts.items():
        yield f"    {name:30s}{size / _GIB:9.3f}"
    for found in step.collectives:
        yield (
            f"    {found.kind:20s}{found.ops:5d} in the program, {found.executions:8d} executed, "
            f"{found.bytes / _GIB:9.2f} GiB of results"
        )
    for shape in step.gathered_logits:
        yield f"    gathers what looks like logits or a whole head: {shape}"


def _work(verdict: Verdict) -> Iterator[str]:
    names = " ".join(f"{name} {flops:.3g}" for name, flops in verdict.flops.items())
    yield f"FLOPs an iteration of full-length responses: {names}"
    for step, seconds in verdict.seconds.items():
        yield f"  {step:8s}{seconds:9.1f} s at the given utilisation"
