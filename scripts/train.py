"""Train a Hugging Face causal LM with PPO.

    python scripts/train.py configs/tiny.yaml run_dir=runs/mine optim.policy.lr=2e-5

Several files are layered left to right, then come the key=value overrides.

Several processes train one model when each is started with --coordinator host:port --processes N
--process I, or with --cluster where SLURM, a TPU pod or GKE says who they are. All see one run_dir.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from jaxrl.config import Config
from jaxrl.config_io import config_to_yaml, describe, load_config
from jaxrl.errors import ConfigError, JaxrlError


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
    parser.add_argument("--step", help="what --eval evaluates: latest, best or an iteration")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes train")
    parser.add_argument("--process", type=int, metavar="I", help="which this is, from 0")
    parser.add_argument(
        "--cluster", action="store_true", help="one of several processes, as the cluster says"
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
        if flags.step and not flags.eval:
            raise ConfigError(f"--step {flags.step} says what --eval evaluates; give --eval too")
        if flags.print_config:
            print(config_to_yaml(config), flush=True)
            return 0
        # Imported late: --help and a wrong setting answer at once.
        from jaxrl import commands

        together = (flags.coordinator, flags.processes, flags.process)
        if flags.cluster or together != (None, None, None):
            return train_together(config, flags)
        print(config_to_yaml(config), flush=True)
        if flags.dry_run:
            return commands.dry_run(config)
        if flags.eval:
            return commands.evaluate_only(config, flags.step)
        return commands.run(config)
    except JaxrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def train_together(config: Config, flags: argparse.Namespace) -> int:
    """`commands.run` as one of several processes; an error here ends the others too."""
    from jaxrl import commands
    from jaxrl.processes import connect

    if flags.dry_run or flags.eval:
        raise ConfigError("--dry-run and --eval are for one process; leave the flags of others out")
    peers = connect(flags.coordinator, flags.processes, flags.process)
    if peers.leads:
        print(config_to_yaml(config), flush=True)
    try:
        return commands.run(config, peers)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        if not isinstance(error, JaxrlError):
            traceback.print_exc()
        print(message, file=sys.stderr, flush=True)
        peers.fail(message)
        os._exit(1)  # JAX would wait for the others at a normal exit


if __name__ == "__main__":
    raise SystemExit(main())
