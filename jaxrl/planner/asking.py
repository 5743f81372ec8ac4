"""Asking a compiler: the process it runs in, its environment, and what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import Config
from jaxrl.config_io import save_config
from jaxrl.errors import ConfigError, JaxrlError
from jaxrl.models import ModelConfig
from jaxrl.planner.memory import StepMemory, step_from_json
from jaxrl.planner.targets import Target

__all__ = ["PlanError", "ask_compiler", "environment", "interpreter"]

ROOT = Path(__file__).parents[2]


class PlanError(JaxrlError, RuntimeError):
    """A compiler could not be asked, or failed for another reason than memory."""


def interpreter(target: Target) -> Path:
    """The Python that has the target's compiler.

    Raises:
        PlanError: The environment with it is not there, with the command that makes it.
    """
    if target.kind == "cpu":
        return Path(sys.executable)
    venv = Path(os.environ.get("JAXRL_PLAN_VENV", ROOT / ".venv-plan"))
    python = venv / "bin" / "python"
    if not python.exists():
        raise PlanError(
            f"target {target} needs the compilers for GPUs and TPUs, which {venv} has not; run "
            "scripts/make_env.sh plan (90 seconds, 2.6 GB), or set JAXRL_PLAN_VENV to an "
            "environment with jaxrl[plan-cuda,plan-tpu]"
        )
    return python


def environment(target: Target) -> dict[str, str]:
    """Variables that the compiler's process needs: no device is looked for."""
    dropped = ("XLA_", "JAX_", "TPU_", "LIBTPU_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    kept |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if target.kind == "cpu":
        # Nothing is run: machine code need not be good, and a third of the time is spent on that.
        count = f"--xla_force_host_platform_device_count={target.devices}"
        kept["XLA_FLAGS"] = f"{count} --xla_backend_optimization_level=0"
    elif target.kind == "cuda":
        kept["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    elif target.kind == "tpu":
        # No metadata server is asked who we are, and other plans may be under way.
        kept |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return kept


def ask_compiler(
    config: Config,
    model: ModelConfig,
    target: Target,
    steps: Sequence[str],
    *,
    hbm: int | None = None,
    keep: Path | None = None,
) -> tuple[tuple[StepMemory, ...], dict[str, str]]:
    """Compile these steps for the target; returns what it says of each, and versions.

    Args:
        config: The run.
        model: Its model's shape.
        target: One that compiles.
        steps: Of "score", "update", "sample".
        hbm: Bytes of a device, for compilers that schedule by it.
        keep: Folder for the compiled programs' text.

    Raises:
        PlanError: The compiler is not there, or failed; not when it refuses for memory.
    """
    python = interpreter(target)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        save_config(config, Path(folder, "config.yaml"))
        asked: dict[str, Any] = {
            "config": str(Path(folder, "config.yaml")),
            "model": model.to_hf(),
            "target": str(target),
            "hbm": hbm,
            "steps": list(steps),
            "keep": None if keep is None else str(keep),
        }
        request.write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [str(python), "-m", "jaxrl.planner.compiling", str(request), str(answer)],
            env=environment(target),
            capture_output=True,
            text=True,
        )
        if not answer.exists():
            raise PlanError(_failure(target, done))
        found = json.loads(answer.read_text(encoding="utf-8"))
    return tuple(step_from_json(step) for step in found["steps"]), found["versions"]


def _failure(target: Target, done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {done.returncode}, no message"
    if "ConfigError: " in last:
        raise ConfigError(last.split("ConfigError: ", 1)[1])
    tail = "\n".join(lines[-15:])
    return f"the compiler for {target} failed: {last}\n{tail}"
