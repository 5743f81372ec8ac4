"""Real SGLang servers and routers for tests: started with the scripts, and surely ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "serve_sglang_cpu.sh"
KEEPER = ROOT / "jaxrl" / "rollout" / "sglang" / "keeper.py"
START_S = 240.0
"""A server starts in half a minute; in two or three on a machine that others use as well."""


class RunningServer:
    """A process group behind a URL. It ends with the test process, however that ends."""

    def __init__(self, command: Sequence[str], port: int, log: Path, health: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._health = health
        lifeline, self._lifeline = os.pipe()
        with log.open("ab") as file:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", str(KEEPER), str(lifeline), *command],
                pass_fds=[lifeline],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )
        os.close(lifeline)

    @property
    def pid(self) -> int:
        """Leader of the server's process group."""
        listed = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text()
        return int(listed.split()[0])

    def alive(self) -> bool:
        return self._keeper.poll() is None

    def kill(self) -> None:
        """SIGKILL, as if the machine's memory had run out; returns when all of it is gone."""
        os.killpg(self.pid, signal.SIGKILL)
        self._keeper.wait(timeout=20.0)

    def freeze(self) -> None:
        """It holds its connections and says nothing, until `thaw`."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it properly; nothing happens if it has ended already."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self._keeper.wait(timeout=30.0)

    def healthy(self) -> bool:
        try:
            return httpx.get(self.url + self._health, timeout=10.0, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def wait_healthy(self, seconds: float = START_S) -> RunningServer:
        """Raises with the end of the log if it ends, or is not healthy in time."""
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if not self.alive() or time.monotonic() > deadline:
                state = "not healthy" if self.alive() else "gone"
                self.stop()
                raise RuntimeError(f"{self.url} is {state}; its log ends with\n{self.tail()}")
            time.sleep(0.3)
        return self

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


def start_server(
    model: Path, port: int | None = None, *flags: str, log: Path | None = None
) -> RunningServer:
    """Start a server and return at once; see `RunningServer.wait_healthy`."""
    _require("JAXRL_SGLANG_VENV", ".venv-sglang", "--install")
    port = port or free_port()
    sizes = ["--context-length", "512", "--max-running-requests", "16", "--max-total-tokens=8192"]
    command = [str(SCRIPT), str(model), "--port", str(port), *sizes, *flags]
    return RunningServer(command, port, log or model.with_name(f"server-{port}.log"), "/health")


def start_router(
    urls: Sequence[str], port: int | None = None, *flags: str, log: Path
) -> RunningServer:
    """Start a router in front of servers that are healthy; returns at once."""
    _require("JAXRL_ROUTER_VENV", ".venv-sglang-router", "--install-router")
    port = port or free_port()
    command = [str(SCRIPT), "--router", *urls, "--port", str(port), *flags]
    return RunningServer(command, port, log, "/readiness")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _require(variable: str, folder: str, option: str) -> None:
    venv = ROOT / os.environ.get(variable, folder)
    if not (venv / "jaxrl.stamp").is_file():
        raise RuntimeError(
            f"{venv} is missing or half-made; run: scripts/{SCRIPT.name} {option}"
            f" (or set {variable} to where it is)"
        )
