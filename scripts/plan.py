"""What a run needs, before it costs anything.

    python scripts/plan.py configs/qwen3_4b_dapo_sglang.yaml --target analytic:h100:8
    python scripts/plan.py my.yaml mesh.fsdp=16 mesh.tensor=4 --target cuda:h100:1x8x8 --hbm 80GiB

Targets: analytic:64 or analytic:h100:64 (formulas, at once), cpu:64 (compiles the run's steps on
virtual devices: shardings and collectives), cuda:h100:1x8x8 and tpu:v5p:4x4x4 (the real compilers,
no device needed; scripts/make_env.sh plan installs them). The model's weights are not needed: its
shape comes from model.path, from configs/models, or from --model-config.

Exit status: 0 fits or no verdict was asked for, 1 something is wrong, 2 does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jaxrl.config_io import load_config
from jaxrl.errors import JaxrlError

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
STEPS = ("score", "update", "sample")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Flags, config files and overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="+", metavar="FILE.yaml | key.sub=value")
    parser.add_argument("--target", required=True, help="who is asked about which devices")
    parser.add_argument("--hbm", help="memory of a device, e.g. 80GiB; the chip's if it is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there as well")
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json")
    parser.add_argument("--steps", default="score,update", help="of score, update, sample")
    parser.add_argument("--utilisation", type=float, default=0.4, help="of the chip's peak")
    parser.add_argument("--response-tokens", type=int, help="mean length that times are for")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the programs' text")
    flags = parser.parse_intermixed_args(argv)
    files = [a for a in flags.arguments if "=" not in a]
    overrides = [a for a in flags.arguments if "=" in a]
    return flags, files, overrides


def main(argv: list[str] | None = None) -> int:
    """Plan; returns the exit status."""
    flags, files, overrides = parse(sys.argv[1:] if argv is None else argv)
    # Imported late: --help and a wrong setting answer at once.
    try:
        config = load_config([Path(file) for file in files], overrides)
        from jaxrl.planner import find_model, parse_bytes, parse_target, plan_run
        from jaxrl.planner.report import plan_text

        name, model = find_model(config, flags.model_config, MODELS)
        verdict = plan_run(
            config,
            model,
            parse_target(flags.target),
            name=name,
            hbm=parse_bytes(flags.hbm) if flags.hbm else None,
            utilisation=flags.utilisation,
            response_tokens=flags.response_tokens,
            steps=steps_of(flags.steps),
            keep=flags.keep,
        )
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(plan_text(verdict))
    if flags.json:
        flags.json.write_text(json.dumps(verdict.to_json(), indent=2) + "\n", encoding="utf-8")
    return 2 if verdict.fits is False else 0


def steps_of(text: str) -> list[str]:
    """The names in a list with commas."""
    from jaxrl.errors import ConfigError

    names = text.split(",")
    for name in names:
        if name not in STEPS:
            raise ConfigError(f"--steps {text!r}: {name!r} is none of {', '.join(STEPS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
