"""Servers of the run: filled in, started, logged, restarted, and ended in every case."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jaxrl.errors import ConfigError
from jaxrl.rollout.sglang.launch import RESTARTS, ServerProcesses, fill_command
from tests.rollout.sglang.servers import ROOT, SCRIPT, START_S, free_port

VALUES = {"host": "127.0.0.1", "port": 30000, "model": "a model", "index": 0}
URLS = ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]

# Writes its own id and that of a process it has forked; both would outlive who started them.
FAMILY = """
import os, sys, time
child = os.fork()
if child == 0:
    time.sleep(1000)
print(os.getpid(), child, flush=True)
time.sleep(1000)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY


def python(code: str, *words: str) -> str:
    return shlex.join([sys.executable, "-u", "-c", code, *words])


def wait_until(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def ids(log: Path) -> list[int]:
    """The ids that FAMILY has written."""
    wait_until(lambda: log.is_file() and log.read_text().endswith("\n"))
    return [int(word) for word in log.read_text().split()]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


Start = Callable[..., ServerProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that end with the test; logs are in tmp_path."""
    made: list[ServerProcesses] = []

    def start(command: str, urls: list[str] = URLS[:1], model: str = "m") -> ServerProcesses:
        made.append(ServerProcesses(command, urls, model=model, log_dir=tmp_path))
        made[-1].start()
        return made[-1]

    yield start
    for processes in made:
        processes.close()


def test_words_are_filled_in_after_splitting() -> None:
    command = "serve '{model}' --at={host}:{port} '--x={\"a\": {\"b\": 1}}' {index}"
    assert fill_command(command, VALUES) == [
        "serve",
        "a model",
        "--at=127.0.0.1:30000",
        '--x={"a": {"b": 1}}',
        "0",
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve {prot}", r"unknown placeholder \{prot\}; allowed: \{host\}, \{port\}, \{model\}, "),
        ("serve {}", r"unknown placeholder \{\}"),
        ("serve 'x", "No closing quotation"),
        ("  ", "rollout.launch is empty"),
    ],
)
def test_a_command_that_cannot_be_used(command: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerProcesses(command, URLS, model="m", log_dir=tmp_path)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:30000", "http://host:port"])
def test_a_url_without_host_or_port(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs http://host:port"):
        ServerProcesses("serve", [url], model="m", log_dir=tmp_path)


def test_one_url_for_two_servers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        ServerProcesses("serve", [URLS[0], URLS[0] + "/"], model="m", log_dir=tmp_path)


def test_each_url_has_a_server_and_a_log_that_is_written_at_once(
    start: Start, tmp_path: Path
) -> None:
    code = "import sys, time; print(*sys.argv[1:]); time.sleep(1000)"
    processes = start(python(code, "{index}", "{host}", "{port}", "{model}"), URLS)
    for index, port in enumerate((30000, 30001)):
        log = tmp_path / f"server-{index}.log"
        wait_until(lambda log=log: log.is_file() and log.read_text())
        assert log.read_text() == f"{index} 127.0.0.1 {port} m\n"
    assert processes.dead() == {}


def test_close_ends_all_of_it_and_may_be_called_twice(start: Start, tmp_path: Path) -> None:
    processes = start(python(FAMILY), URLS)
    family = ids(tmp_path / "server-0.log") + ids(tmp_path / "server-1.log")
    assert len(family) == 4 and all(map(running, family))
    processes.close()
    assert not any(map(running, family))
    processes.close()
    assert processes.dead() == {}


def test_close_ends_what_ignores_sigterm_after_five_seconds(start: Start, tmp_path: Path) -> None:
    processes = start(python(DEAF), URLS)
    family = ids(tmp_path / "server-0.log") + ids(tmp_path / "server-1.log")
    began = time.monotonic()
    processes.close()
    seconds = time.monotonic() - began
    assert not any(map(running, family))
    assert 4.5 < seconds < 14.0  # both at once, and not by the limit for a keeper


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
@pytest.mark.parametrize("family", [FAMILY, DEAF], ids=["polite", "deaf"])
def test_nothing_outlives_the_trainer(family: str, how: str, tmp_path: Path) -> None:
    ending = {"kill": "time.sleep(1000)", "exit": "os._exit(0)", "raise": "1 / 0"}[how]
    code = f"""
import os, sys, time
from pathlib import Path
from jaxrl.rollout.sglang.launch import ServerProcesses
folder = Path(sys.argv[2])
processes = ServerProcesses(sys.argv[1], {URLS!r}, model="m", log_dir=folder)
processes.start()
while not all((folder / f"server-{{i}}.log").read_text().endswith("\\n") for i in (0, 1)):
    time.sleep(0.05)
{ending}
"""
    command = [sys.executable, "-c", code, python(family), str(tmp_path)]
    trainer = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "server-1.log").is_file(), 120.0)
        everyone = ids(tmp_path / "server-0.log") + ids(tmp_path / "server-1.log")
        assert len(everyone) == 4
        if how == "kill":
            assert all(map(running, everyone))
            trainer.kill()
        trainer.wait(timeout=60.0)
        wait_until(lambda: not any(map(running, everyone)), 15.0)
    finally:
        trainer.kill()
        trainer.wait()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(start: Start, tmp_path: Path) -> None:
    start(python(FAMILY))
    leader, child = ids(tmp_path / "server-0.log")
    groups = {os.getpgid(leader), os.getpgid(child)}
    assert groups == {leader}
    assert os.getsid(leader) != os.getsid(0)


def test_a_killed_keeper_takes_the_server_with_it(start: Start, tmp_path: Path) -> None:
    processes = start(python(FAMILY))
    leader, child = ids(tmp_path / "server-0.log")
    keeper = int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
    assert keeper != os.getpid()
    os.kill(keeper, signal.SIGKILL)
    try:
        wait_until(lambda: not running(leader))
        assert "exit code -9" in processes.dead()[URLS[0]]
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_that_ends_at_once_is_reported_with_the_end_of_its_log(start: Start) -> None:
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit('no such model: {model}')"
    processes = start(python(code))
    wait_until(processes.dead)
    (said,) = processes.dead().values()
    assert said.startswith("ended with exit code 1; ")
    assert said.endswith("\n98\n99\nno such model: m")
    assert "\n79\n" not in said


def test_a_program_that_does_not_exist_is_named(start: Start) -> None:
    processes = start("no-such-program --port {port}")
    wait_until(processes.dead)
    assert "cannot start no-such-program: No such file" in processes.dead()[URLS[0]]


def test_a_signal_is_named_and_the_rest_of_the_group_is_ended(start: Start, tmp_path: Path) -> None:
    processes = start(python(FAMILY))
    leader, child = ids(tmp_path / "server-0.log")
    os.kill(leader, signal.SIGSEGV)
    wait_until(processes.dead)
    assert "exit code 139 (SIGSEGV)" in processes.dead()[URLS[0]]
    wait_until(lambda: not running(child))


def test_one_that_has_ended_is_started_again_three_times(start: Start, tmp_path: Path) -> None:
    processes = start(python("print('up'); raise SystemExit(3)"), URLS)
    log = tmp_path / "server-0.log"
    for times in range(1, RESTARTS + 1):
        wait_until(lambda: URLS[0] in processes.dead())
        # The end of this life's log, without that of earlier ones.
        assert processes.dead()[URLS[0]].endswith(f"{log} ends with\nup")
        assert processes.revive(URLS[0] + "/")
        wait_until(lambda times=times: log.read_text() == "up\n" * (times + 1))
    wait_until(lambda: URLS[0] in processes.dead())
    assert not processes.revive(URLS[0])
    assert not processes.revive(URLS[0])
    assert log.read_text() == "up\n" * (RESTARTS + 1)
    assert (tmp_path / "server-1.log").read_text() == "up\n"  # each has its own three


def test_one_that_runs_is_not_started_again(start: Start, tmp_path: Path) -> None:
    processes = start(python(FAMILY))
    family = ids(tmp_path / "server-0.log")
    assert all(processes.revive(URLS[0]) for _ in range(2 * RESTARTS))
    assert ids(tmp_path / "server-0.log") == family and all(map(running, family))


def test_no_descriptor_is_left_open(start: Start, tmp_path: Path) -> None:
    before = descriptors()
    processes = start(python("pass"), URLS)
    for _ in range(RESTARTS):
        wait_until(lambda: len(processes.dead()) == 2)
        assert all(map(processes.revive, URLS))
    assert descriptors() != before  # the lifelines
    processes.close()
    assert descriptors() == before


def test_the_server_does_not_hold_its_own_lifeline(start: Start, tmp_path: Path) -> None:
    start(python("import os; print(*sorted(os.listdir('/proc/self/fd')))"))
    wait_until(lambda: (tmp_path / "server-0.log").read_text())
    assert (tmp_path / "server-0.log").read_text().split() == ["0", "1", "2", "3"]  # 3: the folder


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "serve_sglang_cpu.sh MODEL_FOLDER"),
        (["--prot", "1"], 2, "serve_sglang_cpu.sh MODEL_FOLDER"),
        (["no-such-folder"], 1, "no-such-folder is no model folder: it has no config.json"),
        (["--router", "--port", "1"], 1, "--router needs the servers' URLs"),
    ],
)
def test_what_the_script_refuses(words: list[str], code: int, said: str) -> None:
    command = [str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == code and said in done.stderr


@pytest.mark.slow
def test_a_real_server_by_its_script(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = f"{shlex.quote(str(SCRIPT))} '{{model}}' --host {{host}} --port {{port}}"
    processes = start(f"{command} --context-length 128", [url], str(tiny_model))

    def healthy() -> bool:
        assert not processes.dead(), processes.dead()[url]
        try:
            return httpx.get(f"{url}/health", timeout=10.0, trust_env=False).is_success
        except httpx.TransportError:
            return False

    wait_until(healthy, START_S)
    info = httpx.get(f"{url}/server_info", timeout=10.0, trust_env=False).json()
    assert info["context_length"] == 128 and info["model_path"] == str(tiny_model)
    processes.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=10.0, trust_env=False)
