"""Writes docs/plans.md: estimates beside what the compilers for GPUs and TPUs say.

    python scripts/plan_table.py            # asks for what docs/plans.json lacks; hours on 2 cores
    python scripts/plan_table.py --ask 0    # writes the table from docs/plans.json alone
    python scripts/plan_table.py --again    # asks for everything again, after a change of the steps

Every answer is kept in docs/plans.json as it comes, with its date and the versions that gave it; a
run that was stopped continues. scripts/make_env.sh plan installs the compilers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config_io import load_config
from jaxrl.errors import JaxrlError
from jaxrl.planner import Verdict, find_model, parse_target, plan_run
from jaxrl.planner.table import Answer, table_text
from jaxrl.provenance import git_commit

ROOT = Path(__file__).resolve().parents[1]
KEPT, TABLE = ROOT / "docs" / "plans.json", ROOT / "docs" / "plans.md"
SMALL, LARGE = "qwen3_4b_dapo_sglang", "qwen3_32b_dapo_sglang"
SPREAD = ("mesh.fsdp=16", "mesh.tensor=4", "packing.micro_batch_tokens=163840")
RUNS = (
    (SMALL, "Qwen3-4B-Base", (), ("cuda:h100:1x1x8", "tpu:v5p:2x2x2")),
    (SMALL, "Qwen3-4B-Base", SPREAD, ("cuda:h100:1x8x8", "tpu:v5p:4x4x4")),
    (LARGE, "Qwen3-32B", (), ("cuda:h100:1x8x8", "tpu:v5p:4x4x4")),
    (LARGE, "Meta-Llama-3-70B", (), ("cuda:h100:1x8x8", "tpu:v5p:4x4x4")),
)
CRITICS = {"head": (), "own trunk, reference": ("critic.kind=model", "algorithm.kl_in=report")}
# One trajectory a row: a TPU's own attention kernel takes rows without shared prompts.
FOR_TPU = ("packing.share_prompts=false",)


@dataclass(frozen=True)
class Case:
    """One question."""

    config: str
    model: str
    critic: str
    overrides: tuple[str, ...]
    target: str

    @property
    def command(self) -> str:
        """What asks it by hand; also the key it is kept under."""
        words = (f"configs/{self.config}.yaml", *self.overrides, "--target", self.target)
        return " ".join(("python scripts/plan.py", *words))

    def ask(self) -> Verdict:
        """The compiler's answer; estimates are worked out anew when the table is written."""
        return self._plan(self.target)

    def estimate(self) -> Verdict:
        """The plan without the compiler, for the same devices."""
        target = parse_target(self.target)
        return self._plan(f"analytic:{target.chip}:{target.devices}")

    def _plan(self, target: str) -> Verdict:
        config = load_config([ROOT / "configs" / f"{self.config}.yaml"], self.overrides)
        file = ROOT / "configs" / "models" / f"{self.model}.json"
        name, model = find_model(config, file, file.parent)
        return plan_run(config, model, parse_target(target), name=name)


def cases() -> Iterator[Case]:
    """Every row of the table, the quick compiler's first."""
    for kind in ("cuda", "tpu"):
        for critic, wanted in CRITICS.items():
            for config, model, mesh, targets in RUNS:
                target = next(t for t in targets if t.startswith(kind))
                more = FOR_TPU if kind == "tpu" else ()
                path = (f"model.path=models/{model}",)
                yield Case(config, model, critic, (*path, *mesh, *wanted, *more), target)


def main() -> int:
    """Ask, keep, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ask", type=int, metavar="N", help="how many answers to ask for at most")
    parser.add_argument("--again", action="store_true", help="ask for what is kept, too")
    flags = parser.parse_args()
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    missing = [case for case in cases() if flags.again or case.command not in kept]
    failed = 0
    for case in missing[: flags.ask]:
        print(case.command, flush=True)
        began = time.perf_counter()
        try:
            answer = case.ask()
        except JaxrlError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        commit = short(git_commit(ROOT))
        kept[case.command] = {"date": day, "commit": commit, "plan": answer.to_json()}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"  {time.perf_counter() - began:.0f} s: {answer.reason}", flush=True)
    write(kept)
    return 1 if failed else 0


def short(commit: str | None) -> str:
    """A commit as a page has it; "-dirty" stays."""
    if commit is None:
        return "unknown"
    name, *changed = commit.split("-")
    return "-".join([name[:7], *changed])


def write(kept: dict[str, Any]) -> None:
    """The table of what has been answered."""
    TABLE.write_text(table_text(list(answers_of(kept))), encoding="utf-8")
    print(f"{TABLE.relative_to(ROOT)}: {len(kept)} of {len(list(cases()))} cases")


def answers_of(kept: dict[str, Any]) -> Iterator[Answer]:
    """What has been answered, in the table's order, each beside its estimate of today."""
    for case in cases():
        if case.command in kept:
            found = kept[case.command]
            compiled = Verdict.from_json(found["plan"])
            made = f"{found['date']}, code {found['commit']}"
            yield Answer(case.critic, case.command, made, compiled, case.estimate())


if __name__ == "__main__":
    raise SystemExit(main())
