"""Run by `test_processes`, once a process: what several processes tell each other.

Usage: python joined.py PORT COUNT INDEX SCENE
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from jaxrl.errors import RolloutError
from jaxrl.processes import Peers, connect, share_of


def talk(peers: Peers) -> None:
    """Values come in the order of processes, to all, from several threads at once."""
    others = list(range(peers.count))
    for turn in range(3):
        assert peers.exchange("turn", (turn, peers.index)) == [(turn, i) for i in others]
    with ThreadPoolExecutor(4) as threads:
        names = [f"thread {i}" for i in range(8)]
        # Each process asks in another order.
        asked = names[peers.index :] + names[: peers.index]
        found = dict(zip(asked, threads.map(lambda n: peers.exchange(n, n), asked), strict=True))
    assert found == {name: [name] * peers.count for name in names}
    big = bytes(5_000_000)
    assert peers.exchange("big", big) == [big] * peers.count
    parts = peers.together("parts", lambda: list(share_of(list(range(7)), peers)))
    assert sum(parts, []) == list(range(7)) and {len(p) for p in parts} <= {2, 3, 4}


def refuse(peers: Peers) -> None:
    """One process fails: its error on each, with its message; and the run can go on."""

    def work() -> int:
        if peers.index == peers.count - 1:
            raise RolloutError("no server answers")
        return peers.index

    try:
        peers.together("work", work)
    except RolloutError as error:
        print(f"caught {error}", flush=True)
    assert peers.exchange("after", 1) == [1] * peers.count


def die(peers: Peers) -> None:
    """The last process is killed while the others wait for it."""
    if peers.index == peers.count - 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    peers.exchange("never", None)


def fail(peers: Peers) -> None:
    """The last process ends with an error of its own while the others wait for it."""
    if peers.index == peers.count - 1:
        peers.fail("RewardError: no such column")
        os._exit(1)
    peers.exchange("never", None)


if __name__ == "__main__":
    port, count, index = (int(text) for text in sys.argv[1:4])
    joined = connect(f"127.0.0.1:{port}", count, index)
    {"talk": talk, "refuse": refuse, "die": die, "fail": fail}[sys.argv[4]](joined)
    joined.close()
    print("parted", flush=True)
