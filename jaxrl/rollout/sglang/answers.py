"""One completion, from whichever server gives it: asking, asking again, giving up.

A failure makes its server be looked at. If that is down, the failure does not count against the
request, which goes elsewhere; and the others of that server are taken back at once. A request keeps
its id however often it is sent, so no server works on it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from jaxrl.errors import RolloutError
from jaxrl.http_client import Busy, Refused, ServerError, Unreachable
from jaxrl.rollout.sglang.pool import Pool
from jaxrl.rollout.sglang.replies import BadReply, Request
from jaxrl.rollout.sglang.seat import Seat
from jaxrl.types import Trajectory

__all__ = ["answer"]

_LONGEST_WAIT_S = 8.0


async def answer(
    pool: Pool, request: Request, read: Callable[[Any], Trajectory]
) -> Trajectory | ServerError:
    """Get one completion; `read` makes a trajectory of the reply, or raises BadReply.

    Returns:
        The completion, or why there is none: the request is refused for good, or each attempt
        brought an answer that cannot be used.

    Raises:
        RolloutError: no server is up for `Limits.gone_s`, or servers that are in order fail again
            and again.
    """
    attempts = 0
    while True:
        seat = await pool.free_seat()
        failure: ServerError
        try:
            return read(await _call(pool, seat, request))
        except Refused as error:
            if "duplicate request" not in str(error).lower():
                return Refused(f"{request.name}: {error}", error.body)
            failure = error
        except (Busy, Unreachable, BadReply) as error:
            failure = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            pool.retries += 1  # its server was left out
            continue
        pool.retries += 1
        if not await _in_order(pool, seat):
            continue
        attempts += 1
        if attempts >= pool.limits.attempts:
            if isinstance(failure, BadReply):
                return failure
            raise RolloutError(
                f"{request.name}: no answer after {attempts} attempts; the last: {failure}"
            )
        await asyncio.sleep(min(0.25 * 2.0 ** (attempts - 1), _LONGEST_WAIT_S))
        await _abort(pool, seat, request)


async def _call(pool: Pool, seat: Seat, request: Request) -> Any:
    """Send it; cancelled from outside when the server is left out."""
    task = asyncio.ensure_future(
        seat.client.post("/generate", request.body(), timeout_s=pool.limits.request_s)
    )
    seat.calls.add(task)
    try:
        reply = await task
        seat.heard = asyncio.get_running_loop().time()
        return reply
    finally:
        seat.calls.discard(task)
        task.cancel()
        await pool.freed()


async def _in_order(pool: Pool, seat: Seat) -> bool:
    """Whether everything a request to `seat` depends on is up."""
    if seat is not pool.router:
        return await pool.examine(seat)
    before = [server.up for server in pool.servers]
    await pool.examine_all()
    return all(before) and all(server.up for server in pool.seats)


async def _abort(pool: Pool, seat: Seat, request: Request) -> None:
    """The server may still be at it; a router does not pass that on."""
    if seat is not pool.router:
        with contextlib.suppress(ServerError):
            await seat.client.post("/abort_request", {"rid": request.rid}, timeout_s=5.0)
