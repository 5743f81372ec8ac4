"""Train a Hugging Face causal LM with PPO.

    python scripts/train.py configs/tiny.yaml run_dir=runs/mine optim.policy.lr=2e-5

Several files are layered left to right, then come the key=value overrides.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxrl.config_io import config_to_yaml, describe, load_config
from jaxrl.errors import JaxrlError


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Flags, config files and overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arguments", nargs="*", metavar="FILE.yaml | key.sub=value")
    parser.add_argument("--print-config", action="store_true", help="print the settings and stop")
    parser.add_argument("--list-settings", action="store_true", help="every key, and why; and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="check and compile everything, train nothing"
    )
    parser.add_argument(
        "--eval", action="store_true", help="evaluate the newest checkpoint, or the model; and stop"
    )
    flags = parser.parse_intermixed_args(argv)  # flags may stand anywhere
    files = [a for a in flags.arguments if "=" not in a]
    overrides = [a for a in flags.arguments if "=" in a]
    return flags, files, overrides


def main(argv: list[str] | None = None) -> int:
    """Run; returns the exit status."""
    flags, files, overrides = parse(sys.argv[1:] if argv is None else argv)
    if flags.list_settings:
        print(describe())
        return 0
    try:
        config = load_config([Path(file) for file in files], overrides)
        print(config_to_yaml(config), flush=True)
        if flags.print_config:
            return 0
        # Imported late: --help and a wrong setting answer at once.
        from jaxrl import commands

        if flags.dry_run:
            return commands.dry_run(config)
        if flags.eval:
            return commands.evaluate_only(config)
        return commands.run(config)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
