"""The servers of a run: who is usable, and how those that are not come back.

A server is *up* when it is healthy and was seen to run the published weights. Requests go to the up
server with the fewest in flight. A watch looks at servers that are silent and leaves out those that
are not in order; it lets one back in when it is healthy and has the weights again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from jaxrl.errors import RolloutError
from jaxrl.http_client import Busy, Refused, ServerClient, ServerError
from jaxrl.rollout.sglang.seat import Limits, Seat

__all__ = ["Pool"]


class Pool:
    """Servers that answer requests; all of it runs in one event loop."""

    def __init__(
        self,
        servers: Sequence[ServerClient],
        router: ServerClient | None,
        limits: Limits,
        *,
        current: Callable[[ServerClient], Awaitable[None]],
        revive: Callable[[], Mapping[str, str]],
    ) -> None:
        """Make a pool whose servers are all still to be looked at.

        Args:
            servers: each holds the weights.
            router: where requests go, instead of to the servers.
            limits: see there.
            current: makes sure that a healthy server runs the published weights, or raises.
            revive: restarts servers of ours that have ended; gives url -> why for those that end
                again and again.
        """
        self.limits = limits
        self.servers = [Seat(client, limits.concurrency) for client in servers]
        self.router = router and Seat(
            router, limits.concurrency * len(servers), health_path="/readiness"
        )
        self.retries = 0
        self._current = current
        self._revive = revive
        self._changed = asyncio.Condition()
        self._steady = asyncio.Event()
        self._steady.set()
        self._pauses = 0
        self._watch: asyncio.Task[None] | None = None
        self._rechecking: asyncio.Task[None] | None = None

    @property
    def seats(self) -> list[Seat]:
        """Router and servers."""
        return [*([self.router] if self.router else []), *self.servers]

    async def start(self) -> None:
        """Wait until every server and the router are healthy; then watch them.

        Raises:
            RolloutError: one is not, after `Limits.gone_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.gone_s
        waiting = self.seats
        while waiting := [seat for seat in waiting if not await self._started(seat)]:
            hopeless = self._revive()
            if hopeless or loop.time() > deadline:
                for seat in waiting:
                    seat.reason = hopeless.get(seat.client.url, seat.reason)
                raise self._gone(waiting)
            await asyncio.sleep(0.5)
        if self.router:
            self.router.up = True
        self._watch = asyncio.create_task(self._keep_watch())

    async def close(self) -> None:
        """Stop watching and close the connections."""
        if self._watch:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        for seat in self.seats:
            await seat.client.close()

    async def examine(self, seat: Seat) -> bool:
        """Look at a server; whether it is up afterwards."""
        if seat.looking is None:
            seat.looking = asyncio.create_task(self._examine(seat))
            seat.looking.add_done_callback(lambda _: setattr(seat, "looking", None))
        return await asyncio.shield(seat.looking)

    async def _examine(self, seat: Seat) -> bool:
        while True:
            # A server that is paused for a publish answers no health check.
            await self._steady.wait()
            pauses = self._pauses
            error = await self._fault(seat)
            if error is None:
                await self.admit(seat)
                return True
            if pauses == self._pauses:
                seat.down(str(error))
                return False

    async def _fault(self, seat: Seat) -> RolloutError | None:
        """What keeps a server from being asked, if anything; what can be put right is."""
        try:
            if seat is self.router:
                await self._healthy(seat)
            elif seat.up:
                await self._healthy(seat)
                await self._current(seat.client)
            else:
                await self._wake(seat)
                await self._healthy(seat)
                # What it had of ours before it was left out has gone to others since.
                await seat.client.post("/abort_request", {"abort_all": True})
                await self._current(seat.client)
        except RolloutError as error:
            return error
        return None

    async def _wake(self, seat: Seat) -> None:
        """End a pause that somebody began and could not end, a trainer that was killed say."""
        with contextlib.suppress(Refused):  # older servers have no pause
            await seat.client.post("/continue_generation", {}, timeout_s=self.limits.health_s)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While servers are paused, none is looked at."""
        self._pauses += 1
        self._steady.clear()
        try:
            yield
        finally:
            self._steady.set()

    async def admit(self, seat: Seat) -> None:
        """Let a server in."""
        seat.up, seat.heard = True, asyncio.get_running_loop().time()
        async with self._changed:
            self._changed.notify_all()

    async def freed(self) -> None:
        """A request has ended: one that waits may take its place."""
        async with self._changed:
            self._changed.notify()

    async def recheck(self) -> None:
        """See that the servers that are up still run the weights; quick, where nothing happened.

        One that was restarted since it was last asked is healthy, and would answer. Callers that
        ask at once, each with an episode of its own say, share one look.
        """
        if self._rechecking is None:
            self._rechecking = asyncio.create_task(self._recheck())
            self._rechecking.add_done_callback(lambda _: setattr(self, "_rechecking", None))
        await asyncio.shield(self._rechecking)

    async def _recheck(self) -> None:
        async def one(seat: Seat) -> None:
            try:
                await self._current(seat.client)
            except RolloutError as error:
                seat.down(str(error))

        await asyncio.gather(*(one(seat) for seat in self.servers if seat.up))

    async def examine_all(self) -> None:
        """Look at all of them at once."""
        await asyncio.gather(*(self.examine(seat) for seat in self.seats))

    async def free_seat(self) -> Seat:
        """A server that may be asked now; it is to be asked without anything awaited between.

        Raises:
            RolloutError: none is up for `Limits.gone_s`.
        """
        loop = asyncio.get_running_loop()
        gone_at: float | None = None
        while True:
            up = [seat for seat in ([self.router] if self.router else self.servers) if seat.up]
            if self.router and not any(server.up for server in self.servers):
                up = []
            free = [seat for seat in up if len(seat.calls) < seat.capacity]
            if free:
                return min(free, key=lambda seat: len(seat.calls))
            if up:
                gone_at = None
            elif gone_at is None:
                gone_at = loop.time() + self.limits.gone_s
            elif loop.time() > gone_at:
                raise self._gone(self.seats)
            await self._any_change()

    async def wait_until_up(self) -> None:
        """Return once a server is up.

        Raises:
            RolloutError: none is, after `Limits.gone_s`.
        """
        deadline = asyncio.get_running_loop().time() + self.limits.gone_s
        while not any(server.up for server in self.servers):
            if asyncio.get_running_loop().time() > deadline:
                raise self._gone(self.servers)
            await self._any_change()

    async def _any_change(self) -> None:
        """Until a server has room or is let in, and at most a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0), self._changed:
                await self._changed.wait()

    def _gone(self, seats: Sequence[Seat]) -> RolloutError:
        listed = "; ".join(f"{seat.client.url}: {seat.reason}" for seat in seats if not seat.up)
        return RolloutError(
            f"no usable server (waited up to rollout.gone_timeout_s={self.limits.gone_s:g} s): "
            f"{listed}"
        )

    async def _started(self, seat: Seat) -> bool:
        try:
            if seat is not self.router:
                await self._wake(seat)
            await self._healthy(seat)
        except ServerError as error:
            seat.reason = str(error)
            return False
        return True

    async def _healthy(self, seat: Seat) -> None:
        """Raise what is wrong with it."""
        try:
            await seat.client.get(seat.health_path, timeout_s=self.limits.health_s)
        except Refused as error:
            raise Busy(str(error)) from error

    async def _keep_watch(self) -> None:
        """Look at servers that are out, and at those that owe answers but are silent."""
        loop = asyncio.get_running_loop()
        period = min(2.0, self.limits.health_s / 2)
        while True:
            await asyncio.sleep(period)
            hopeless = self._revive()
            silent = loop.time() - period
            looked = [s for s in self.seats if not s.up or (s.calls and s.heard < silent)]
            await asyncio.gather(*(self.examine(seat) for seat in looked))
            for seat in looked:
                seat.reason = hopeless.get(seat.client.url, seat.reason)
