"""Publishing weights to all servers, and to one that comes back.

pause (requests are held, their tokens so far kept) -> update -> continue -> confirm. A request that
was under way goes on with the new weights and reports which tokens are whose. A server that does
not confirm is left out; the pool's watch brings it back through `make_current`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from jaxrl.errors import RolloutError
from jaxrl.http_client import Busy, ServerClient, Unreachable
from jaxrl.rollout.sglang.gather import all_of, failures
from jaxrl.rollout.sglang.memory import release, take_back
from jaxrl.rollout.sglang.pool import Pool
from jaxrl.rollout.sglang.weights import Probe, Snapshot, confirm, pause, resume

__all__ = ["Publisher"]


class Publisher:
    """What was published, and to whom; all of it runs in one event loop."""

    def __init__(self) -> None:
        """Nothing has been published."""
        self.versions: dict[str, int] = {}
        """Weight version of each tag that a server may name."""
        self.version: int | None = None
        """The version that was published last."""
        self._sent: tuple[Snapshot, Probe] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._asleep = False

    async def publish(self, pool: Pool, snapshot: Snapshot, probe: Probe) -> None:
        """Make every server run `snapshot`; returns when at least one does.

        Raises:
            RolloutError: every server refuses, or none is up in time.
        """
        async with self._one_at_a_time:
            before, self._sent = self._sent, (snapshot, probe)
            self.versions[snapshot.tag] = snapshot.version
            # The first time all are asked; later those that are out are brought back by the watch.
            targets = [seat for seat in pool.servers if seat.up or before is None]
            with pool.paused():
                failed = await self._send([seat.client for seat in targets])
            for seat in targets:
                if error := failed.get(seat.client.url):
                    seat.down(str(error))
                else:
                    await pool.admit(seat)
            self.version = snapshot.version
            if before:
                before[0].discard()
        passing = [e for e in failed.values() if isinstance(e, Busy | Unreachable)]
        if targets and len(failed) == len(targets) and not passing:
            raise RolloutError(
                f"no server took the weights of version {snapshot.version}: "
                + "; ".join(f"{url}: {error}" for url, error in failed.items())
            )
        await pool.wait_until_up()

    async def make_current(self, client: ServerClient) -> None:
        """See that a healthy server runs the weights sent last; send them again if it does not.

        Raises:
            RolloutError: it does not take them, or none have been sent.
        """
        async with self._one_at_a_time:
            if self._sent is None:
                raise RolloutError("no weights have been published yet")
            info = await client.get("/model_info")
            if isinstance(info, dict) and info.get("weight_version") == self._sent[0].tag:
                return
            for error in (await self._send([client])).values():
                raise RolloutError(str(error)) from error

    async def rest(self, pool: Pool) -> None:
        """The servers' memory goes to the trainer, until the next publish."""
        await all_of(release(seat.client) for seat in pool.servers if seat.up)
        self._asleep = True

    def discard(self) -> None:
        """Remove what was published from where it lies."""
        if self._sent:
            self._sent[0].discard()

    async def _send(self, clients: Sequence[ServerClient]) -> dict[str, Exception]:
        """Send the last snapshot; url -> why, for the servers that do not run it now."""
        assert self._sent is not None
        snapshot, probe = self._sent
        asleep, self._asleep = self._asleep, False
        failed: dict[str, Exception] = {}

        async def step(call) -> None:  # noqa: ANN001
            going = [client for client in clients if client.url not in failed]
            failed.update(await failures(going, call))

        if asleep:
            await step(lambda client: take_back(client, "weights"))
        await step(pause)
        try:
            if going := [client for client in clients if client.url not in failed]:
                failed.update(await snapshot.send(going))
            if asleep:
                await step(lambda client: take_back(client, "kv_cache"))
        finally:
            # A server that stays paused answers nobody, and nobody would know why.
            failed = await failures(clients, resume) | failed
        await step(lambda client: confirm(client, snapshot, probe))
        return failed
