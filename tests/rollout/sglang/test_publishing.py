"""Weights out, to a real server: it runs what was sent, all of it, under the right name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.checkpoint.hf_export import export_hf
from jaxrl.errors import ConversionError, RolloutError
from jaxrl.http_client import Refused, ServerClient
from jaxrl.models import Model
from jaxrl.rollout.sglang.weights import (
    Probe,
    confirm,
    disk_snapshot,
    tensor_snapshot,
)
from tests.rollout.sglang.asking import own_logprobs
from tests.rollout.sglang.faulty import Alter, Answer, FaultyProxy
from tests.rollout.sglang.models import CONFIG, make_params
from tests.rollout.sglang.publishing import (
    IDS,
    UPDATE,
    WAYS,
    Snap,
    check_runs,
    generate,
    talk,
    update,
    version,
)
from tests.rollout.sglang.servers import RunningServer, start_server
from tests.rollout.sglang.unpickled import tensors_in

TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


VALUE_HEAD = {"value_head": {"kernel": np.ones((64, 1), np.float32), "bias": np.zeros(1)}}


def rounded(params: Any, dtype: str) -> Any:
    kind = {"float32": np.float32, "bfloat16": jax.numpy.bfloat16}[dtype]
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(kind).astype(np.float32), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_ws01_the_server_runs_what_was_sent_without_its_old_cache(
    way: str, dtype: str, server_url: str, snap: Snap, old: Any, new: Any
):
    first, second = snap(way, old), snap(way, new, dtype=dtype)
    sent = rounded(new, dtype)
    assert np.abs(own_logprobs(old, IDS) - own_logprobs(sent, IDS)).max() > 1.0

    async def work(client: ServerClient) -> None:
        assert await update(client, first) == {}
        await check_runs(client, old, first.tag)
        # The prompt is in the cache now, and would be used.
        assert (await generate(client, IDS, 1))["meta_info"]["cached_tokens"] >= len(IDS) - 1
        assert await update(client, second) == {}
        await check_runs(client, sent, second.tag)
        probe = Probe(IDS, own_logprobs(sent, IDS), 1e-4)
        assert await confirm(client, second, probe) < 1e-5
        assert await confirm(client, second, None) == 0.0

    talk(server_url, work)


def test_a_bucket_per_tensor_and_one_for_all_say_the_same(
    server_url: str, snap: Snap, old: Any, new: Any
):
    with FaultyProxy(server_url) as proxy:
        for params, size, requests in ((new, 10**9, 1), (old, 1, 25)):
            snapshot = snap("tensor", params, bucket_bytes=size)
            before = proxy.count(UPDATE)
            assert talk(proxy.url, lambda c, s=snapshot: update(c, s)) == {}
            assert proxy.count(UPDATE) - before == requests
            talk(server_url, lambda c, p=params, s=snapshot: check_runs(c, p, s.tag))
        # Neither name nor flush before the last bucket.
        named = ["weight_version" in body for body in proxy.bodies(UPDATE)]
        flushes = [body["flush_cache"] for body in proxy.bodies(UPDATE)]
        assert named == flushes == [True] + [False] * 24 + [True]


def test_confirmation_fails_for_other_numbers_and_other_names(
    server_url: str, snap: Snap, old: Any, new: Any
):
    sent, other = snap("disk", old), snap("tensor", new)
    right = own_logprobs(old, IDS)

    async def work(client: ServerClient) -> None:
        assert await update(client, sent) == {}
        with pytest.raises(RolloutError, match=r"by 0\.25\d* on average.*probe_tolerance=0\.05"):
            await confirm(client, sent, Probe(IDS, right + 0.25, 0.05))
        with pytest.raises(RolloutError, match="by nan"):
            await confirm(client, sent, Probe(IDS, right * np.nan, 0.05))
        with pytest.raises(RolloutError, match=f"runs weights '{sent.tag}'; '{other.tag}'"):
            await confirm(client, other, Probe(IDS, right, 0.05))
        # The right name on other weights, as after a tensor that the server left out.
        body = {"new_version": other.tag, "abort_all_requests": False}
        await client.post("/update_weight_version", body)
        with pytest.raises(RolloutError, match="does not run the weights of version"):
            await confirm(client, other, Probe(IDS, own_logprobs(new, IDS), 0.05))

    talk(server_url, work)


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[:-1],
        lambda entries: entries[::-1],
        lambda entries: [[None, *e[1:]] for e in entries],
        lambda entries: None,
    ],
    ids=["short", "other order", "null", "none"],
)
def test_a_probe_answer_that_is_not_one_fails(change: Any, server_url: str, snap: Snap, old: Any):
    sent = snap("disk", old)

    def alter(reply: Any) -> Any:
        meta = reply["meta_info"]
        return reply | {
            "meta_info": meta | {"input_token_logprobs": change(meta["input_token_logprobs"])}
        }

    with FaultyProxy(server_url) as proxy:

        async def work(client: ServerClient) -> None:
            assert await update(client, sent) == {}
            proxy.order("/generate", Alter(alter))
            with pytest.raises(RolloutError, match="probe prompt"):
                await confirm(client, sent, Probe(IDS, own_logprobs(old, IDS), 0.05))

        talk(proxy.url, work)


def test_ws03_a_folder_that_has_gone_is_reported_and_the_old_weights_stay(
    server_url: str, snap: Snap, old: Any, new: Any
):
    kept, gone = snap("disk", old), snap("disk", new)
    gone.discard()
    gone.discard()  # once is as good as twice

    async def work(client: ServerClient) -> None:
        assert await update(client, kept) == {}
        failed = await update(client, gone)
        assert list(failed) == [server_url]
        assert isinstance(failed[server_url], Refused)
        assert "/update_weights_from_disk: 400 Failed to" in str(failed[server_url])
        await check_runs(client, old, kept.tag)

    talk(server_url, work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "body",
    [{"success": False, "message": "out of luck"}, {"message": "out of luck"}, "out of luck"],
)
def test_ws03_no_success_is_a_failure_whatever_the_status(
    way: str, body: Any, server_url: str, snap: Snap, old: Any
):
    with FaultyProxy(server_url) as proxy:
        proxy.order(UPDATE, Answer(200, body))
        proxy.order("/update_weights_from_disk", Answer(200, body))
        failed = talk(proxy.url, lambda client: update(client, snap(way, old)))
        assert "out of luck" in str(failed[proxy.url])


@pytest.mark.parametrize("way", WAYS)
def test_ws05_incomplete_parameters_are_refused_before_anything_is_sent(
    way: str, snap: Snap, tmp_path: Path, old: Any
):
    """The server would keep its old values for what is missing and say success."""
    holed = jax.tree.map(lambda leaf: leaf, old)
    del holed["layers"]["mlp"]["up"], holed["norm"]
    with pytest.raises(ConversionError) as caught:
        snap(way, holed)
    assert "missing: layers.mlp.up.kernel" in str(caught.value)
    assert "missing: norm.scale" in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tied")
    export_hf(folder / "model", tied(make_params(seed=20)), TIED)
    running = start_server(folder / "model", log=folder / "server.log")
    try:
        yield running.wait_healthy()
    finally:
        running.stop()


def tied(params: Any) -> Any:
    """The head's scale goes to the embedding, which is both."""
    without = {name: tree for name, tree in params.items() if name != "head"}
    return without | {"embed": {"weight": params["head"]["kernel"].T.copy()}}


@pytest.mark.parametrize("way", WAYS)
def test_ws06_a_tied_embedding_is_followed_as_input_and_as_head(
    way: str, tied_server: RunningServer, snap: Snap
):
    first, later = tied(make_params(seed=21)), tied(make_params(seed=22))
    only_embedding = first | {"embed": later["embed"]}

    async def work(client: ServerClient) -> None:
        for params in (first, only_embedding):
            snapshot = snap(way, params, config=TIED)
            assert await update(client, snapshot) == {}
            await check_runs(client, params, snapshot.tag, TIED)
            assert (
                await confirm(
                    client, snapshot, Probe(IDS, own_logprobs(params, IDS, config=TIED), 1e-4)
                )
                < 1e-5
            )

    assert (
        np.abs(
            own_logprobs(first, IDS, config=TIED) - own_logprobs(only_embedding, IDS, config=TIED)
        ).max()
        > 1.0
    )
    talk(tied_server.url, work)


def test_the_value_head_never_leaves(server_url: str, snap: Snap, tmp_path: Path, old: Any):
    snap("disk", old | VALUE_HEAD)
    files = list(tmp_path.rglob("*.safetensors"))
    written = [name for path in files for name in load_file(path)]
    with FaultyProxy(server_url) as proxy:
        assert talk(proxy.url, lambda c: update(c, snap("tensor", old | VALUE_HEAD))) == {}
        bodies = proxy.bodies(UPDATE)
    payloads = [payload for body in bodies for payload in body["serialized_named_tensors"]]
    sent = [name for payload in payloads for name in tensors_in(payload)]
    assert len(written) == len(sent) == 25
    assert sorted(sent) == sorted(written)
    for name in sent:
        assert "value" not in name and name.split(".")[0] in ("model", "lm_head")


def test_older_servers_have_no_sessions(server_url: str, snap: Snap, new: Any):
    with FaultyProxy(server_url) as proxy:
        proxy.order("/begin_weight_update", Answer(404, {"detail": "Not Found"}))
        proxy.order(UPDATE, Answer(200, {"success": True, "message": "Success"}), times=99)
        assert talk(proxy.url, lambda client: update(client, snap("tensor", new))) == {}
        assert proxy.count(UPDATE) > 3 and proxy.count("/end_weight_update") == 0


def test_each_process_of_a_tensor_parallel_server_gets_an_entry(
    server_url: str, snap: Snap, new: Any
):
    snapshot = snap("tensor", new)
    with FaultyProxy(server_url) as proxy:
        proxy.order("/server_info", Alter(lambda info: info | {"tp_size": 2}))
        assert talk(proxy.url, lambda client: update(client, snapshot)) == {}
        for body in proxy.bodies(UPDATE):
            one, other = body["serialized_named_tensors"]
            assert one == other
    talk(server_url, lambda client: check_runs(client, new, snapshot.tag))


def test_donated_parameters_are_a_clear_error(server_url: str, snap: Snap, old: Any, new: Any):
    kept = snap("disk", old)
    params = jax.tree.map(jax.numpy.asarray, new)
    snapshot = snap("tensor", params)
    params["layers"]["mlp"]["up"]["kernel"].delete()

    async def work(client: ServerClient) -> None:
        assert await update(client, kept) == {}
        with pytest.raises(RolloutError, match="no longer there.*donated"):
            await update(client, snapshot)
        # The session was ended, and the half that came was not given the name.
        assert await version(client) == kept.tag
        await client.post("/begin_weight_update", {})
        await client.post("/end_weight_update", {})
        snapshot.discard()
        with pytest.raises(RolloutError, match="have been discarded"):
            await snapshot.send([client])

    talk(server_url, work)


def test_an_unwritable_folder_names_the_setting(tmp_path: Path, old: Any):
    (tmp_path / "file").touch()
    with pytest.raises(RolloutError, match="rollout.publish_dir"):
        disk_snapshot(
            old, CONFIG, source=None, root=tmp_path / "file", dtype="float32", version=1, tag="t"
        )


_SINK = """
import http.server, sys
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        left = int(self.headers["content-length"])
        while left:
            left -= len(self.rfile.read(min(left, 65536)))
        self.do_GET()
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "16")
        self.end_headers()
        self.wfile.write(b'{"success":true}')
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def sink() -> Iterator[str]:
    """A server that says yes to everything, in a process whose memory is not traced."""
    process = subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


def test_memory_of_a_publish_is_that_of_a_bucket_not_of_the_model(sink: str):
    bucket, peaks = 1 << 20, []
    for layers in (4, 24):
        config = dataclasses.replace(
            CONFIG, hidden_size=128, intermediate_size=512, num_hidden_layers=layers
        )
        shapes = jax.eval_shape(Model(config).init, jax.random.key(0))
        params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        snapshot = tensor_snapshot(
            params, config, dtype="float32", bucket_bytes=bucket, version=1, tag="t"
        )
        tracemalloc.start()
        try:
            assert talk(sink, lambda client, s=snapshot: s.send([client])) == {}
            peaks.append(tracemalloc.get_traced_memory()[1] / bucket)
        finally:
            tracemalloc.stop()
    assert size > 20 * bucket
    # Weights or their text (a third more), the text in JSON, the JSON in bytes.
    assert max(peaks) < 4.2
    assert peaks[1] < peaks[0] + 0.3
