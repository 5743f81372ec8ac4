"""What is known of one server, and the limits that requests to it keep."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

from jaxrl.http_client import ServerClient

__all__ = ["Limits", "Seat"]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How much and how long."""

    concurrency: int
    """Requests in flight at one server."""
    attempts: int
    """Times a request is sent while its server is in order."""
    request_s: float
    """Seconds a request may take."""
    health_s: float
    """Seconds a health check may take."""
    gone_s: float
    """Seconds without any server that is up."""


@dataclasses.dataclass(eq=False)
class Seat:
    """One server and what is known of it."""

    client: ServerClient
    capacity: int
    health_path: str = "/health"
    up: bool = False
    reason: str = "not looked at yet"
    heard: float = 0.0
    """Loop time of its last good answer."""
    calls: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
    looking: asyncio.Task[bool] | None = None
    """The examination that is under way: requests that fail together share one."""

    def down(self, reason: str) -> None:
        """Leave it out, and take back what it was working on."""
        if self.up:
            log.warning("%s is left out: %s", self.client.url, reason)
        self.up, self.reason = False, reason
        for call in self.calls:
            call.cancel()
