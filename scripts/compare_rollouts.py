"""Rollouts by SGLang and by the trainer's own sampler from the same weights: what differs?

    python scripts/compare_rollouts.py configs/tiny.yaml configs/with_sglang_cpu.yaml

Three rounds of greedy rollouts, an update and a publish each; prints the table and writes it to
run_dir/compare_rollouts.{md,json}. Fails where a difference goes beyond its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from contextlib import closing
from pathlib import Path

from jaxrl.compare import Row, compare, config_for_comparison, faults, table
from jaxrl.config_io import load_config
from jaxrl.errors import JaxrlError
from jaxrl.setup import build
from jaxrl.state import fresh_state, reference_params


def main() -> int:
    """Run it; 1 if a limit is passed or the input is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="FILE.yaml | key.sub=value")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--max-loss-diff", type=float, default=1.5e-3, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--max-logprob-diff", type=float, default=1e-4, help="mean, in nats (default: %(default)s)"
    )
    args = parser.parse_intermixed_args()
    try:
        rows = run(args.arguments, args.rounds)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    problems = faults(rows, max_loss=args.max_loss_diff, max_logprob=args.max_logprob_diff)
    for problem in problems:
        print(f"FAILED  {problem}", file=sys.stderr)
    return 1 if problems else 0


def run(arguments: list[str], rounds: int) -> list[Row]:
    """Compare, print, and write the table."""
    files = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    config = config_for_comparison(load_config(files, overrides))
    with closing(build(config)) as ready:
        state = fresh_state(config, ready.model, ready.mesh, ready.optimizers)
        reference = None
        if config.needs_reference:
            reference = reference_params(config, ready.model, ready.mesh)
        rows = list(compare(ready, state, reference, rounds=rounds))
    print(table(rows))
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare_rollouts.md").write_text(table(rows) + "\n", encoding="utf-8")
    plain = [dataclasses.asdict(row) for row in rows]
    (folder / "compare_rollouts.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(main())
