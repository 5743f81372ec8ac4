"""Runs SGLang's HTTP server on a CPU: `serve.py FLAGS`, those of `sglang.launch_server`.

Its processes are spawned and begin with the imports of this file, so that the stand-ins reach them.
"""

from __future__ import annotations

import os
import sys

import cpu_stand_ins  # noqa: F401  first


def main(flags: list[str]) -> None:
    """Serve until told to stop, and leave no process behind."""
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(flags))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
