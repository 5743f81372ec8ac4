"""What a publish sends to servers, how they take it, and how they prove that they have it.

The order is `pause` -> `Snapshot.send` -> `resume` -> `confirm`. A server says success for a
checkpoint that lacks tensors and keeps their old values, so everything is checked against the
weights table before it is sent. It takes the new version's name only with the last of the weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.checkpoint.hf_export import export_hf, hf_tensors
from jaxrl.checkpoint.hf_files import TensorSource
from jaxrl.errors import RolloutError
from jaxrl.http_client import ServerClient
from jaxrl.models import ModelConfig
from jaxrl.rollout.sglang.bucket import flattened_bucket, split_into_buckets
from jaxrl.rollout.sglang.gather import failures
from jaxrl.rollout.sglang.session import TensorSession, load_from_disk

__all__ = ["Probe", "Snapshot", "confirm", "disk_snapshot", "pause", "resume", "tensor_snapshot"]


class Probe(NamedTuple):
    """A prompt as the trainer scores it."""

    ids: tuple[int, ...]
    """At least two tokens."""
    logprobs: np.ndarray
    """log p(ids[t] | ids[<t]) for t >= 1 at temperature 1: one fewer than `ids`."""
    tolerance: float
    """Largest mean absolute difference of the server's, in nats."""


class Snapshot(Protocol):
    """The weights of one version, to be sent to any number of servers, again if need be."""

    @property
    def version(self) -> int:
        """The trainer's count."""
        ...

    @property
    def tag(self) -> str:
        """What servers are told as their weight_version; no other trainer's."""
        ...

    async def send(self, servers: Sequence[ServerClient]) -> dict[str, Exception]:
        """Update paused servers; url -> why, for those that did not take it all.

        Raises:
            RolloutError: the weights are no longer there.
        """
        ...

    def discard(self) -> None:
        """Let go of the weights, on disk as well; idempotent."""
        ...


def disk_snapshot(
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path | None,
    root: Path,
    dtype: str,
    version: int,
    tag: str,
) -> Snapshot:
    """Write the weights into the folder ``root / tag``, which servers read.

    Args:
        params: the policy's, complete.
        config: what they are.
        source: Hugging Face folder of the same model, for config and tokenizer.
        root: a folder that trainer and servers see under the same absolute path.
        dtype: "float32" or "bfloat16", as written.
        version: see `Snapshot`.
        tag: see `Snapshot`.

    Raises:
        ConversionError: the parameters do not fit `config`; all that is wrong is listed.
        RolloutError: the folder cannot be written.
    """
    folder = root.absolute() / tag
    try:
        export_hf(folder, params, config, source=source, dtype=dtype)
    except OSError as error:
        raise RolloutError(
            f"cannot write weights into {folder} ({error}); rollout.publish_dir names another place"
        ) from error
    return _DiskSnapshot(version, tag, folder)


def tensor_snapshot(
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: str,
    bucket_bytes: int,
    version: int,
    tag: str,
) -> Snapshot:
    """Weights that are fetched and sent bucket by bucket; nothing is fetched yet.

    Arguments as for `disk_snapshot`, but `params` are held until `discard`, and `bucket_bytes` is
    the most bytes of weights in a request; a larger tensor goes alone.

    Raises:
        ConversionError: the parameters do not fit `config`; all that is wrong is listed.
        RolloutError: `dtype` or `bucket_bytes` is none.
    """
    tensors = hf_tensors(params, config)
    buckets = split_into_buckets(tensors, dtype=dtype, bucket_bytes=bucket_bytes)
    return _TensorSnapshot(version, tag, dtype, buckets)


async def pause(server: ServerClient) -> None:
    """Hold all requests and take their cache entries away; they keep their tokens so far."""
    await server.post("/pause_generation", {"mode": "retract"})


async def resume(server: ServerClient) -> None:
    """Go on with the requests that are held, their prefixes computed anew."""
    await server.post("/continue_generation", {})


async def confirm(server: ServerClient, snapshot: Snapshot, probe: Probe | None) -> float:
    """See that a running server has the weights; the mean difference on the probe, in nats.

    Raises:
        RolloutError: it names another version, or scores the probe otherwise.
    """
    info = await server.get("/model_info")
    running = info.get("weight_version") if isinstance(info, dict) else None
    if running != snapshot.tag:
        raise RolloutError(
            f"{server.url} runs weights {running!r}; {snapshot.tag!r} (version {snapshot.version}) "
            "were sent"
        )
    if probe is None:
        return 0.0
    theirs = await _prompt_logprobs(server, probe.ids)
    difference = float(np.mean(np.abs(theirs - probe.logprobs)))
    if not difference <= probe.tolerance:  # nor is NaN
        raise RolloutError(
            f"{server.url} does not run the weights of version {snapshot.version}: its "
            f"log-probabilities of the probe prompt differ from the trainer's by {difference:.6g} "
            f"on average (theirs {theirs.mean():.6g}, ours {np.mean(probe.logprobs):.6g}); allowed "
            f"is rollout.probe_tolerance={probe.tolerance:g}"
        )
    return difference


async def _prompt_logprobs(server: ServerClient, ids: Sequence[int]) -> np.ndarray:
    reply = await server.post(
        "/generate",
        {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    try:
        entries = reply["meta_info"]["input_token_logprobs"]
        scored = [entry[1] for entry in entries]
        # The first token follows nothing: null.
        logprobs = np.asarray([entry[0] for entry in entries[1:]], np.float64)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RolloutError(f"{server.url} does not score the probe prompt: {reply}") from error
    # SGLang names the vocabulary's last id 0 here, as it does for the hashes that stand for images.
    if len(scored) != len(ids) or any(s not in (i, 0) for s, i in zip(scored, ids, strict=True)):
        raise RolloutError(f"{server.url} scored {scored} for the probe prompt {list(ids)}")
    return logprobs


@dataclass(frozen=True)
class _DiskSnapshot:
    version: int
    tag: str
    folder: Path

    async def send(self, servers: Sequence[ServerClient]) -> dict[str, Exception]:
        return await failures(
            servers, lambda server: load_from_disk(server, str(self.folder), self.tag)
        )

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _TensorSnapshot:
    version: int
    tag: str
    dtype: str
    buckets: list[list[TensorSource]]

    async def send(self, servers: Sequence[ServerClient]) -> dict[str, Exception]:
        buckets = list(self.buckets)
        if not buckets:
            raise RolloutError(f"the weights of version {self.version} have been discarded")
        sessions = {server.url: TensorSession(server, self.tag) for server in servers}
        failed = await failures(servers, lambda server: sessions[server.url].open())
        try:
            for number, tensors in enumerate(buckets, start=1):
                going = [server for server in servers if server.url not in failed]
                if going:
                    last = number == len(buckets)
                    failed |= await self._send_bucket(tensors, going, sessions, last)
        finally:
            unclosed = await failures(servers, lambda server: sessions[server.url].close())
        return unclosed | failed

    async def _send_bucket(
        self,
        tensors: list[TensorSource],
        servers: Sequence[ServerClient],
        sessions: Mapping[str, TensorSession],
        last: bool,
    ) -> dict[str, Exception]:
        """Make a bucket and send it to all at once; it is gone when this returns."""
        bucket = await asyncio.to_thread(self._pack, tensors)
        return await failures(servers, lambda server: sessions[server.url].load(bucket, last))

    def _pack(self, tensors: list[TensorSource]) -> str:
        try:
            return flattened_bucket(tensors, self.dtype)
        except RuntimeError as error:
            if "deleted" not in str(error):
                raise
            raise RolloutError(
                f"the weights of version {self.version} are no longer there: an update has taken "
                "their memory (donated arrays); publish before it, or set rollout.publish=disk"
            ) from error

    def discard(self) -> None:
        self.buckets.clear()
