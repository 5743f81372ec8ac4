"""Rollouts from SGLang servers: the engine that the trainer sees.

The trainer's thread asks; an event loop in a thread of its own talks to the servers.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import RolloutConfig
from jaxrl.errors import RolloutError
from jaxrl.http_client import ServerClient, ServerError
from jaxrl.logprobs import token_logprobs
from jaxrl.loop_thread import LoopThread
from jaxrl.models import Model
from jaxrl.rollout.engine import LeftOut, OnDone, check_request, request_keys
from jaxrl.rollout.sglang.answers import answer
from jaxrl.rollout.sglang.gather import all_of, failures
from jaxrl.rollout.sglang.launch import ServerProcesses
from jaxrl.rollout.sglang.pool import Pool
from jaxrl.rollout.sglang.publisher import Publisher
from jaxrl.rollout.sglang.replies import Request, check_sampling, read_reply
from jaxrl.rollout.sglang.seat import Limits
from jaxrl.rollout.sglang.weights import Probe, Snapshot, disk_snapshot, tensor_snapshot
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["SGLangEngine"]

log = logging.getLogger(__name__)
_CONTROL_S = 120.0
"""Seconds that a control call (pause, update, flush, versions) may take."""


class SGLangEngine:
    """A `RolloutEngine` whose completions come from servers."""

    def __init__(
        self,
        model: Model,
        rollout: RolloutConfig,
        *,
        source: str,
        run_dir: str | Path,
        probe_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        """Start the servers that are ours to start, and wait until all are healthy.

        Args:
            model: the policy's decoder.
            rollout: section `rollout` of the settings.
            source: Hugging Face folder the policy comes from; servers find config and tokenizer in
                what is published.
            run_dir: logs of launched servers and published weights go below it.
            probe_ids: a prompt of at least two tokens, scored by both sides after each publish.
            max_tokens: longest prompt and completion together.

        Raises:
            RolloutError: a server is not healthy in time, or its context is too short.
        """
        self._model, self._rollout, self._source = model, rollout, source
        self._run = secrets.token_hex(4)
        self._calls = itertools.count()
        self._closed = False
        self._probe_ids = tuple(probe_ids)
        self._weights_dir = _weights_dir(rollout, Path(run_dir))
        self._processes = None
        if rollout.launch is not None:
            self._processes = ServerProcesses(
                rollout.launch, rollout.urls, model=source, log_dir=Path(run_dir) / "servers"
            )
        self._publisher = Publisher()
        self._pool = self._make_pool()
        self._loop = LoopThread("sglang")
        try:
            if self._processes:
                self._processes.start()
            self._loop.run(self._open(max_tokens))
        except BaseException:
            self.close()
            raise

    @property
    def compilations(self) -> int:
        """The scorer of the probe prompt; sampling compiles nothing here."""
        return _prompt_logprobs._cache_size()  # type: ignore[attr-defined]

    @property
    def concurrent(self) -> bool:
        """Yes: requests of several threads are in flight together."""
        return True

    def figures(self) -> dict[str, float]:
        """Counts since the start, and the last publish's difference from the trainer."""
        return {
            "rollout/retries": float(self._pool.retries),
            "rollout/servers_up": float(sum(seat.up for seat in self._pool.servers)),
        }

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        limits: Sequence[int] | None = None,
        on_done: OnDone | None = None,
    ) -> list[Trajectory]:
        """Finish `samples` completions of each prompt, prompt-major; see `RolloutEngine`."""
        vocab = self._model.config.vocab_size
        check_request(prompts, samples=samples, sampling=sampling, vocab_size=vocab, limits=limits)
        check_sampling(sampling)
        if self._publisher.version is None:
            raise RolloutError("no weights have been published; call publish(params, version)")
        requests = self._requests(prompts, samples, sampling, seed, limits)
        return self._loop.run(self._generate(requests, samples, on_done))

    def publish(self, policy_params: Any, version: int) -> None:
        """Make every server sample with these weights; see the module.

        Raises:
            RolloutError: parameters do not fit the model, or no server confirms the weights.
        """
        ids = jnp.asarray(self._probe_ids, jnp.int32)
        own = np.asarray(jax.device_get(_prompt_logprobs(self._model, policy_params, ids)))
        probe = Probe(self._probe_ids, own, self._rollout.probe_tolerance)
        snapshot = self._snapshot(policy_params, version)
        self._loop.run(self._publisher.publish(self._pool, snapshot, probe))

    def rest(self) -> None:
        """Colocated servers give their memory to the trainer until the next publish."""
        if self._rollout.colocated:
            self._loop.run(self._publisher.rest(self._pool))

    def close(self) -> None:
        """End what is under way, and the servers that are ours; remove published weights."""
        if self._closed:
            return
        self._closed = True
        self._loop.run(self._leave())
        self._loop.close()
        if self._processes:
            self._processes.close()
        self._publisher.discard()

    def _make_pool(self) -> Pool:
        rollout = self._rollout
        # Beside the completions there are control calls, which must not wait for a connection.
        options: dict[str, Any] = {
            "connections": rollout.concurrency * len(rollout.urls) + 16,
            "timeout_s": _CONTROL_S,
        }
        return Pool(
            [ServerClient(url, **options) for url in rollout.urls],
            ServerClient(rollout.router, **options) if rollout.router else None,
            Limits(
                concurrency=rollout.concurrency,
                attempts=rollout.attempts,
                request_s=rollout.request_timeout_s,
                health_s=rollout.health_timeout_s,
                gone_s=rollout.gone_timeout_s,
            ),
            current=self._publisher.make_current,
            revive=self._revive,
        )

    async def _open(self, max_tokens: int) -> None:
        """Wait for the servers, and see that the longest request fits each."""
        await self._pool.start()
        for seat in self._pool.servers:
            info = await seat.client.get("/server_info")
            context = info.get("context_length") if isinstance(info, dict) else None
            if context is not None and context < max_tokens:
                raise RolloutError(
                    f"{seat.client.url} was started with --context-length {context}, but "
                    f"data.max_prompt_tokens + rollout.max_new_tokens = {max_tokens}"
                )

    def _requests(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        seed: int,
        limits: Sequence[int] | None = None,
    ) -> list[Request]:
        call = next(self._calls)
        asked = [replace(sampling, max_new_tokens=limit) for limit in limits or ()]
        wanted = [
            (prompt, prompt.first_sample + sample)
            for prompt in prompts
            for sample in range(samples)
        ]
        keys = request_keys(
            seed,
            [prompt.row for prompt, _ in wanted],
            [sample for _, sample in wanted],
            [prompt.epoch for prompt, _ in wanted],
        )
        seeds = np.asarray(jax.random.key_data(keys))[:, 0] >> 1  # a C int on the other side
        version = self._publisher.version or 0
        return [
            Request(
                prompt=prompt,
                sample=sample,
                sampling=asked[i // samples] if asked else sampling,
                seed=int(seeds[i]),
                rid=f"{self._run}-{call}-{i}",
                version=version,
            )
            for i, (prompt, sample) in enumerate(wanted)
        ]

    async def _generate(
        self, requests: Sequence[Request], samples: int, on_done: OnDone | None
    ) -> list[Trajectory]:
        """All of them, as the pool lets them through; a prompt is handed on when it is complete."""
        pool, vocab = self._pool, self._model.config.vocab_size
        await pool.recheck()

        async def complete(group: Sequence[Request]) -> list[Trajectory | ServerError]:
            answers = await all_of(
                answer(pool, r, partial(self._read, request=r, vocab=vocab)) for r in group
            )
            if on_done:
                on_done([got for got in answers if isinstance(got, Trajectory)])
            return answers

        groups = [requests[i : i + samples] for i in range(0, len(requests), samples)]
        answers = [got for group in await all_of(map(complete, groups)) for got in group]
        left_out = [got for got in answers if not isinstance(got, Trajectory)]
        if answers and len(left_out) == len(answers):
            raise LeftOut(f"none of {len(answers)} completions came back: {left_out[0]}")
        for error in left_out:
            log.warning("a completion is left out: %s", error)
        return [got for got in answers if isinstance(got, Trajectory)]

    def _read(self, reply: Any, request: Request, vocab: int) -> Trajectory:
        return read_reply(reply, request, self._publisher.versions, vocab_size=vocab)

    def _snapshot(self, params: Any, version: int) -> Snapshot:
        rollout, config = self._rollout, self._model.config
        shared: dict[str, Any] = {
            "dtype": rollout.publish_dtype,
            "version": version,
            # Weights of another run, or of somebody else, cannot be taken for these.
            "tag": f"{self._run}-{version}",
        }
        if rollout.publish == "tensor":
            return tensor_snapshot(params, config, bucket_bytes=rollout.bucket_bytes, **shared)
        return disk_snapshot(params, config, source=self._source, root=self._weights_dir, **shared)

    def _revive(self) -> dict[str, str]:
        """Start servers of ours again that have ended; url -> why, for those that end each time."""
        if self._processes is None:
            return {}
        ended = self._processes.dead()
        return {url: why for url, why in ended.items() if not self._processes.revive(url)}

    async def _leave(self) -> None:
        """Nothing of ours keeps running on servers that go on without us."""
        if not self._processes:
            busy = [seat.client for seat in self._pool.servers if seat.up and seat.calls]
            await failures(busy, lambda c: c.post("/abort_request", {"abort_all": True}))
        await self._pool.close()


def _weights_dir(rollout: RolloutConfig, run_dir: Path) -> Path:
    """Where published weights lie; absolute, since the servers have another working directory."""
    if rollout.publish_dir is not None:
        return Path(rollout.publish_dir).absolute()
    shared_memory = Path("/dev/shm")
    if rollout.colocated and shared_memory.is_dir():
        return shared_memory / f"jaxrl-{run_dir.absolute().name}"
    return run_dir.absolute() / "weights"


@partial(jax.jit, static_argnums=0)
def _prompt_logprobs(model: Model, params: Any, ids: jax.Array) -> jax.Array:
    """Of each token but the first, given those before it, at temperature 1: [len(ids) - 1]."""
    row, ones = ids[None], jnp.ones((1, len(ids)), jnp.int32)
    hidden = model.hidden(params, row, jnp.arange(len(ids))[None], ones, 0 * ones)
    return token_logprobs(hidden[:, :-1], model.head(params), row[:, 1:])[0]
