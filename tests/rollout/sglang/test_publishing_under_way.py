"""Weights out while requests run, and updates that stop half-way: half is never taken for whole."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from jaxrl.errors import RolloutError
from jaxrl.http_client import ServerClient
from jaxrl.rollout.sglang.weights import (
    Probe,
    Snapshot,
    confirm,
    pause,
    resume,
)
from tests.rollout.sglang.asking import own_logprobs
from tests.rollout.sglang.faulty import Answer, CutBefore, Delay, FaultyProxy, Hang
from tests.rollout.sglang.publishing import (
    IDS,
    UPDATE,
    WAYS,
    Snap,
    check_runs,
    generate,
    running,
    talk,
    update,
    version,
)


@pytest.mark.parametrize("way", WAYS)
def test_requests_under_way_go_on_with_the_new_weights(
    way: str, server_url: str, snap: Snap, old: Any, new: Any
):
    before, after = snap(way, old), snap(way, new)

    async def work(client: ServerClient) -> Any:
        assert await update(client, before) == {}
        under_way = asyncio.create_task(generate(client, IDS, 400))
        await running(client)
        assert await update(client, after) == {}
        return await under_way

    reply = talk(server_url, work)
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert meta["finish_reason"]["type"] == "length" and len(ids) == 400
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [before.tag, after.tag]
    cut = spans[1]["start"]
    assert 0 < cut < 400
    got = np.asarray([entry[0] for entry in meta["output_token_logprobs"]])
    whole = [*IDS, *ids]
    np.testing.assert_allclose(got[:cut], own_logprobs(old, whole)[-400:][:cut], atol=1e-4, rtol=0)
    np.testing.assert_allclose(got[cut:], own_logprobs(new, whole)[-400:][cut:], atol=1e-4, rtol=0)


async def paused_within(client: ServerClient) -> asyncio.Task[Any]:
    """A request that the server holds half done. On a busy machine it may be quicker than we."""
    for _ in range(20):
        under_way = asyncio.create_task(generate(client, IDS, 300))
        await running(client)
        await client.post("/pause_generation", {"mode": "in_place"})
        await asyncio.sleep(0.2)
        if not under_way.done():
            return under_way
        await resume(client)
    raise AssertionError("every request was over before the server paused")


@pytest.mark.parametrize("way", WAYS)
def test_an_update_whose_cache_is_in_use_ends_with_a_flushed_one(
    way: str, server_url: str, snap: Snap, old: Any, new: Any
):
    """Paused in place, a request keeps its entries: updated, but not flushed and not renamed."""
    before, after = snap("disk", old), snap(way, new)
    with FaultyProxy(server_url) as proxy:

        async def work(client: ServerClient) -> None:
            assert await update(client, before) == {}
            under_way = await paused_within(client)
            sending = asyncio.create_task(after.send([client]))
            while proxy.count("/flush_cache") < 3:
                assert not sending.done()
                await asyncio.sleep(0.02)
            assert await version(client) == before.tag
            await resume(client)
            await under_way
            assert await sending == {}
            await check_runs(client, new, after.tag)

        talk(proxy.url, work)


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_that_stays_in_use_is_a_failure(
    way: str, server_url: str, snap: Snap, new: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxrl.rollout.sglang.session._FLUSH_S", 0.5)
    snapshot = snap(way, new)

    async def work(client: ServerClient) -> None:
        under_way = await paused_within(client)
        try:
            failed = await snapshot.send([client])
        finally:
            await resume(client)
        await under_way
        assert "its cache of older ones was in use for 0.5 s" in str(failed[server_url])
        assert await version(client) != snapshot.tag
        assert await update(client, snapshot) == {}
        await check_runs(client, new, snapshot.tag)

    talk(server_url, work)


@pytest.mark.parametrize("fault", [CutBefore(), Answer(500, "Internal Server Error")])
def test_half_an_update_does_not_get_its_name_and_a_full_one_repairs_it(
    fault: Any, server_url: str, snap: Snap, old: Any, new: Any
):
    before, after = snap("tensor", old), snap("tensor", new)
    with FaultyProxy(server_url) as proxy:

        async def work(client: ServerClient) -> None:
            assert await update(client, before) == {}
            asked = proxy.count(UPDATE)
            proxy.order(UPDATE, Delay(0.0))
            proxy.order(UPDATE, fault)
            failed = await update(client, after)
            assert UPDATE in str(failed[proxy.url])
            assert proxy.count(UPDATE) == asked + 2  # a server that failed gets no more of it
            assert proxy.count("/end_weight_update") == 2
            assert await version(client) == before.tag
            with pytest.raises(RolloutError, match="runs weights"):
                await confirm(client, after, None)
            # It is neither the one nor the other.
            with pytest.raises(RolloutError, match="probe prompt differ"):
                await confirm(client, before, Probe(IDS, own_logprobs(old, IDS), 1e-3))
            assert await update(client, after) == {}
            await check_runs(client, new, after.tag)

        talk(proxy.url, work)


def test_one_server_that_fails_does_not_keep_the_others_from_the_weights(
    server_url: str, snap: Snap, old: Any, new: Any
):
    for way in WAYS:
        snapshot = snap(way, new if way == "disk" else old)
        with FaultyProxy(server_url) as proxy:
            proxy.down = True

            async def work(
                client: ServerClient, url: str = proxy.url, s: Snapshot = snapshot
            ) -> Any:
                broken = ServerClient(url, connections=1, timeout_s=5.0)
                await pause(client)
                try:
                    return await s.send([broken, client])
                finally:
                    await resume(client)
                    await broken.close()

            failed = talk(server_url, work)
            assert list(failed) == [proxy.url]
        params = new if way == "disk" else old
        talk(server_url, lambda c, p=params, s=snapshot: check_runs(c, p, s.tag))


def test_a_session_that_was_not_ended_is_reported_and_ended_by_the_next(
    server_url: str, snap: Snap, old: Any, new: Any
):
    first, second = snap("tensor", old), snap("tensor", new)
    with FaultyProxy(server_url) as proxy:

        async def work(client: ServerClient) -> None:
            proxy.order("/end_weight_update", Answer(500, "Internal Server Error"))
            failed = await update(client, first)
            assert "/end_weight_update: 500" in str(failed[proxy.url])
            assert await update(client, second) == {}
            # "already open", end, begin; then its own end
            assert proxy.count("/begin_weight_update") == 3
            assert proxy.count("/end_weight_update") == 3
            await check_runs(client, new, second.tag)

        talk(proxy.url, work)


def test_a_server_that_does_not_begin_gets_no_weights(server_url: str, snap: Snap, old: Any):
    with FaultyProxy(server_url) as proxy:
        proxy.order("/begin_weight_update", Answer(400, {"success": False, "message": "not now"}))
        failed = talk(proxy.url, lambda client: update(client, snap("tensor", old)))
        assert "not now" in str(failed[proxy.url])
        assert proxy.count(UPDATE) == proxy.count("/end_weight_update") == 0


def test_a_cancelled_update_ends_its_session(server_url: str, snap: Snap, old: Any, new: Any):
    before, after = snap("tensor", old), snap("tensor", new)
    with FaultyProxy(server_url) as proxy:

        async def work(client: ServerClient) -> None:
            assert await update(client, before) == {}
            asked = proxy.count(UPDATE)
            proxy.order(UPDATE, Delay(0.0))
            proxy.order(UPDATE, Hang())
            sending = asyncio.create_task(update(client, after))
            while proxy.count(UPDATE) < asked + 2:
                await asyncio.sleep(0.02)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert proxy.count("/end_weight_update") == 2
            assert await version(client) == before.tag
            assert await update(client, after) == {}
            assert proxy.count("/begin_weight_update") == 3
            await check_runs(client, new, after.tag)

        talk(proxy.url, work)
