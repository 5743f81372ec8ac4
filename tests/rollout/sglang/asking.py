"""What the engine's tests share: prompts, an engine on the tiny model, and what must hold after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import RolloutConfig
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.sglang.engine import SGLangEngine
from jaxrl.types import Prompt, Sampling, Trajectory
from tests.rollout.sglang.models import CONFIG, EOS

MODEL = Model(CONFIG)
PROMPTS = [
    Prompt(row=i, ids=tuple((7 * i + 3 * j) % 500 + 3 for j in range(2 + i)), text="", columns={})
    for i in range(8)
]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(EOS,))
LONG = Sampling(max_new_tokens=300, temperature=0.7, stop_token_ids=(EOS,))


def rollout(*urls: str, **settings: Any) -> RolloutConfig:
    quick = {"health_timeout_s": 8.0, "gone_timeout_s": 240.0, "request_timeout_s": 120.0}
    return RolloutConfig(engine="sglang", urls=list(urls), **(quick | settings))


def engine_of(settings: RolloutConfig, model: Path, run_dir: Path) -> SGLangEngine:
    return SGLangEngine(
        MODEL,
        settings,
        source=str(model),
        run_dir=run_dir,
        probe_ids=(5, 6, 7, 8, 9),
        max_tokens=400,
    )


def each_once(got: Sequence[Trajectory], samples: int) -> None:
    wanted = [(prompt.row, sample) for prompt in PROMPTS for sample in range(samples)]
    assert [(t.prompt.row, t.sample) for t in got] == wanted


def scored(params: Any, trajectory: Trajectory, temperature: float = 1.0) -> np.ndarray:
    """jaxrl's own log-probabilities of the response, by a plain forward of this trajectory."""
    return own_logprobs(params, trajectory.ids, temperature)[len(trajectory.prompt.ids) - 1 :]


def own_logprobs(
    params: Any, ids: Sequence[int], temperature: float = 1.0, config: ModelConfig = CONFIG
) -> np.ndarray:
    """log p(ids[t] | ids[<t]) for t >= 1, by a plain forward."""
    # Padded on the right, where causality keeps it out: few lengths to compile for.
    row = np.zeros((1, -(-len(ids) // 128) * 128), np.int32)
    row[0, : len(ids)] = ids
    logits = np.asarray(_logits(config, params, row), np.float64)[0, : len(ids)] / temperature
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(ids) - 1), np.asarray(ids)[1:]]


@partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: Any, row: jax.Array) -> jax.Array:
    model = Model(config)
    ones = jnp.ones_like(row)
    return model.hidden(params, row, jnp.arange(row.shape[1])[None], ones) @ model.head(params)


def honest(params: Any, got: Sequence[Trajectory], temperature: float = 1.0) -> None:
    for trajectory in got:
        own = scored(params, trajectory, temperature)
        np.testing.assert_allclose(trajectory.logprobs, own, atol=1e-4)


def once_busy(engine: SGLangEngine, url: str, do: Callable[[], None]) -> threading.Thread:
    """`do`, a moment after the server of `url` has been given a request of this engine."""
    (seat,) = [seat for seat in engine._pool.servers if seat.client.url == url]

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not seat.calls and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def later(seconds: float, do: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        time.sleep(seconds)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
