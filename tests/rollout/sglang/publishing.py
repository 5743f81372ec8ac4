"""What the tests of publishing share: a client's calls, and whether a server runs what was sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.http_client import ServerClient
from jaxrl.models import ModelConfig
from jaxrl.rollout.sglang.weights import (
    Snapshot,
    pause,
    resume,
)
from tests.rollout.sglang.asking import own_logprobs
from tests.rollout.sglang.models import CONFIG

IDS = tuple((37 * i) % 500 + 3 for i in range(40))
BUCKET = 50_000
UPDATE = "/update_weights_from_tensor"


WAYS = ["disk", "tensor"]
Snap = Callable[..., Snapshot]
"""snap(way, params, dtype=, config=): a snapshot with a tag of its own."""

numbers = itertools.count(1)
"""Of versions: no two snapshots have the same."""


def talk(url: str, work: Callable[[ServerClient], Awaitable[Any]]) -> Any:
    """Run `work` with a client in an event loop that ends with it."""

    async def run() -> Any:
        client = ServerClient(url, connections=8, timeout_s=60.0)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def update(client: ServerClient, snapshot: Snapshot) -> dict[str, Exception]:
    """As the publisher does it, up to the confirmation."""
    await pause(client)
    try:
        return await snapshot.send([client])
    finally:
        await resume(client)


async def version(client: ServerClient) -> str:
    return (await client.get("/model_info"))["weight_version"]


async def generate(client: ServerClient, ids: Sequence[int], new_tokens: int, **more: Any) -> Any:
    """Greedy."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
    return await client.post("/generate", body | more)


async def check_runs(
    client: ServerClient, params: Any, tag: str, config: ModelConfig = CONFIG
) -> None:
    """Prompt and completion are scored as jaxrl does, under the right name.

    The prompt of the completion may come from the prefix cache, that of the scoring does not.
    """
    reply = await generate(client, IDS, 12)
    meta = reply["meta_info"]
    whole = [*IDS, *reply["output_ids"]]
    got = [entry[0] for entry in meta["output_token_logprobs"]]
    np.testing.assert_allclose(
        got, own_logprobs(params, whole, config=config)[-12:], atol=1e-4, rtol=0
    )
    assert meta["weight_version"] == tag == await version(client)
    reply = await generate(client, whole, 0, logprob_start_len=0)
    got = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(got, own_logprobs(params, whole, config=config), atol=1e-4, rtol=0)


async def running(client: ServerClient) -> None:
    """Wait until a request has got its first tokens."""
    while not (await client.get("/v1/loads"))["loads"][0]["num_running_reqs"]:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
