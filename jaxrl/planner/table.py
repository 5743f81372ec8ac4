"""Plans side by side: the page that docs/plans.md is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxrl.planner.memory import StepMemory, Verdict

__all__ = ["Answer", "table_text"]

_GIB = 2**30
_NAMES = {"cuda": "H100", "tpu": "v5p"}
_INTRODUCTION = """\
# Plans of the larger recipes

Written by `scripts/plan_table.py` from `docs/plans.json`. No accelerator was used: estimates are
worked out from shapes and shardings (`jaxrl/planner/temporaries.py`), the other figures are what
the compilers for H100s and TPUs v5p say about the very steps that train, for the longest batch a
run can have (every prompt and every response of full length).

The formulas are no predictions of these figures: they grew out of what both compilers keep alive in
smaller models, and were completed after the H100's figures of these and other settings had been
seen. The TPU's figures below came afterwards and changed nothing in them.

Behind each command stands the commit whose steps were compiled. Where it is not today's, the
compilers' figures are of the steps as they were then, the estimates always today's;
`scripts/plan_table.py --again` asks anew.
"""


@dataclass(frozen=True)
class Answer:
    """A compiler's plan, and the estimate for the same devices."""

    critic: str
    command: str
    made: str
    """When, and by which code."""
    compiled: Verdict
    estimated: Verdict

    @property
    def kind(self) -> str:
        """The compiler."""
        return self.compiled.target.split(":")[0]

    @property
    def run(self) -> tuple[str, str, str]:
        """What is the same for all compilers."""
        sizes = self.compiled.mesh
        mesh = " x ".join(str(size) for size in sizes.values())
        return self.compiled.model, mesh, self.critic


def table_text(answers: Sequence[Answer]) -> str:
    """The page, in Markdown."""
    return "\n".join(_page(answers)) + "\n"


def _page(answers: Sequence[Answer]) -> Iterator[str]:
    yield _INTRODUCTION
    yield "## Memory of a device, GiB"
    yield ""
    yield (
        "Peak of each step's program: what it reads (exact), and what it needs beside. Behind each "
        "compiler's figure is the estimate's error. `all` is the estimate with what lies on the "
        "device meanwhile (optimizers during a score, batches during an update)."
    )
    yield ""
    yield "| model | data x fsdp x tensor | critic | step | read | estimate | H100 | v5p | all |"
    yield "|---|---|---|---|---|---|---|---|---|"
    runs = list(dict.fromkeys(answer.run for answer in answers))
    errors: list[float] = []
    for run in runs:
        yield from _rows([answer for answer in answers if answer.run == run], errors)
    if errors:
        yield ""
        yield (
            f"The estimates are between {min(errors):+.0%} and {max(errors):+.0%} of the "
            f"compilers' peaks, {sum(abs(e) for e in errors) / len(errors):.1%} on average."
        )
    yield ""
    yield "## What an update exchanges"
    yield ""
    yield "Executions in an update, and GiB of their results on a device."
    yield ""
    yield "| model | data x fsdp x tensor | critic | device | all-gather | reduce-scatter | other |"
    yield "|---|---|---|---|---|---|---|"
    for answer in answers:
        yield _exchanges(answer)
    yield ""
    yield "## Commands"
    yield ""
    for versions in dict.fromkeys(_versions(answer.compiled) for answer in answers):
        yield f"With {versions}; the seconds are two steps' on two busy cores:"
        yield ""
        for answer in answers:
            if _versions(answer.compiled) == versions:
                seconds = sum(step.seconds for step in answer.compiled.steps)
                yield f"- `{answer.command}` ({answer.made}, {seconds:.0f} s)"


def _rows(answers: Sequence[Answer], errors: list[float]) -> Iterator[str]:
    estimates = {step.step: step for step in answers[0].estimated.steps}
    for name in ("score", "update"):
        estimate = estimates[name]
        cells = []
        for kind in _NAMES:
            found = [s for a in answers if a.kind == kind for s in a.compiled.steps]
            cells.append(_compared([s for s in found if s.step == name], estimate, errors))
        every = estimate.peak + estimate.beside
        figures = (estimate.arguments, estimate.peak)
        sizes = [f"{size / _GIB:.2f}" for size in figures] + cells + [f"{every / _GIB:.2f}"]
        yield "| " + " | ".join([*answers[0].run, name, *sizes]) + " |"


def _compared(found: Sequence[StepMemory], estimate: StepMemory, errors: list[float]) -> str:
    if not found:
        return "not asked"
    if found[0].refused:
        return "refused"
    error = estimate.peak / found[0].peak - 1
    errors.append(error)
    return f"{found[0].peak / _GIB:.2f} ({error:+.0%})"


def _exchanges(answer: Answer) -> str:
    step = next(step for step in answer.compiled.steps if step.step == "update")
    kinds = {found.kind: found for found in step.collectives}
    other = [found for kind, found in kinds.items() if kind not in ("all-gather", "reduce-scatter")]

    def cell(executions: int, size: int) -> str:
        return f"{executions}, {size / _GIB:.1f}" if executions else "none"

    named = [kinds.get(kind) for kind in ("all-gather", "reduce-scatter")]
    cells = [cell(c.executions, c.bytes) if c else "none" for c in named]
    cells.append(cell(sum(c.executions for c in other), sum(c.bytes for c in other)))
    return "| " + " | ".join([*answer.run, _NAMES[answer.kind], *cells]) + " |"


def _versions(verdict: Verdict) -> str:
    return ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
