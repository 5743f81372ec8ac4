"""Sections of `bench.py` that sample: the trainside engine, and a PPO iteration on SmolLM2."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import Sizes, ragged_batch, sampled_prompts
from bench_model import model_of, weights_of
from bench_timing import Work

from jaxrl.advantage_step import Outcomes
from jaxrl.checkpoint.hf import load_hf_config, load_params
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.iteration import pack_for, plan_for
from jaxrl.models import Model, ModelConfig
from jaxrl.models.sampling import Knobs
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.requests import lay_out_prompts
from jaxrl.rollout.sampler import Request, sample_batch
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.sharding import batch_sharding, make_mesh, place, replicated
from jaxrl.state import fresh_state, make_optimizers, reference_params
from jaxrl.train_steps import make_model, make_steps
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["SMOLLM2", "iteration", "sampler", "sampler_smollm2", "smollm2_sizes"]

SMOLLM2 = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"


def _prompts(ids: Any) -> list[Prompt]:
    return [Prompt(row=i, ids=tuple(map(int, r)), text="", columns={}) for i, r in enumerate(ids)]


def sampler(sizes: Sizes) -> Work:
    """The trainside engine from token ids to trajectories; no stop token, so all rows run on."""
    model = model_of(sizes)
    return _sampling(model, weights_of(model), sizes)


def smollm2_sizes(small: bool) -> Sizes:
    """Those of SmolLM2-135M, with the rows and lengths that are sampled; all or few of them."""
    rows, new = (2, 3) if small else (32, 64)
    return Sizes(
        layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
        sampled_rows=rows, sampled_prompt=32, sampled_new=new,
    )  # fmt: skip


def sampler_smollm2(sizes: Sizes) -> Work:
    """The same with SmolLM2-135M-Instruct."""
    config = ModelConfig.from_hf(load_hf_config(SMOLLM2))
    return _sampling(Model(config), load_params(SMOLLM2, config), sizes)


def _sampling(model: Model, params: Any, sizes: Sizes) -> Work:
    rows, length = sizes.sampled_rows, sizes.sampled_prompt
    ids, sampling = sampled_prompts(sizes), Sampling(max_new_tokens=sizes.sampled_new)
    engine = TrainsideEngine(model, params, batch_size=rows)
    packed = lay_out_prompts(ids.tolist(), rows, length, pad=0, pack=True)
    request = Request(
        keys=request_keys(0, range(rows), [0] * rows),
        limits=jnp.full(rows, sizes.sampled_new, jnp.int32),
        stop_ids=jnp.full(4, -1, jnp.int32),
        knobs=Knobs.of(sampling),
    )
    program = partial(sample_batch, model, samples=1, max_new_tokens=sizes.sampled_new)
    memory = jax.jit(program).lower(params, packed, request).compile().memory_analysis()
    prompts = _prompts(ids)
    return Work(
        lambda: engine.generate(prompts, samples=1, sampling=sampling, seed=0),
        memory.temp_size_in_bytes if memory else 0,
        lambda out: {"new_tokens": float(sum(len(t.response_ids) for t in out))},
        rows * sizes.sampled_new,
    )


def _settings(critic: str, rows: int, longest: int) -> Config:
    """One epoch of one update over all rows, with a reference, as the peer's trainer does."""
    return load_config(
        (),
        (
            f"model.path={SMOLLM2}",
            "model.remat=full",
            f"rollout.prompts={rows}",
            "rollout.samples=1",
            f"rollout.max_new_tokens={longest}",
            f"critic.kind={critic}",
            "algorithm.kl_in=reward",
            "algorithm.kl_coef=0.05",
            "packing.share_prompts=false",
            "packing.micro_batch_tokens=2048",
            "packing.row_lengths=[512]",
            "optim.policy.lr=1e-6",
            "optim.value.lr=1e-6",
        ),
    )


def iteration(sizes: Sizes, *, critic: str) -> Work:
    """Generate, score (old, reference, values), advantages, one epoch of updates; stage by stage.

    What `jaxrl.iteration.iterate` does, with responses of given lengths and a reward that is free.
    """
    rows = 2 if sizes.rows < 8 else 16  # `--small`
    batch = ragged_batch(rows)
    config = _settings(critic, rows, max(batch.response_lengths))
    mesh, optimizers = make_mesh(config.mesh), make_optimizers(config)
    model = make_model(config, ModelConfig.from_hf(load_hf_config(SMOLLM2)), mesh)
    steps = make_steps(config, model, mesh, optimizers)
    holder = [fresh_state(config, model, mesh, optimizers)]
    reference = reference_params(config, model, mesh)
    engine = TrainsideEngine(model, batch_size=rows)
    prompts, sampling = (
        _prompts(batch.prompts),
        Sampling(max_new_tokens=config.rollout.max_new_tokens),
    )
    stages: dict[str, float] = {}

    def generate() -> list[Trajectory]:
        engine.publish(holder[0].policy_params, 0)
        limits = batch.response_lengths
        found = engine.generate(prompts, samples=1, sampling=sampling, seed=0, limits=limits)
        engine.rest()
        return found

    def call() -> Any:
        watch = _Watch(stages)
        trajectories = generate()
        watch.lap("generate_s")
        layout = plan_for(config, trajectories, 1)
        packed = place(pack_for(config, trajectories, layout), batch_sharding(mesh))
        watch.lap("pack_s")
        state = holder[0]
        anchors = steps.score(state.policy_params, state.value_params, reference, packed)
        jax.block_until_ready(anchors)
        watch.lap("score_s")
        trained, _ = steps.advantage(packed, anchors, _outcomes(trajectories, mesh), state.kl_coef)
        holder[0], metrics = steps.update(state, jax.tree.map(lambda x: x[0], trained))
        jax.block_until_ready(holder[0])
        watch.lap("update_s")
        return metrics, layout

    def check(out: Any) -> dict[str, float]:
        metrics, layout = out
        ratio = float(metrics["policy/ratio_mean"])
        return {"efficiency": layout.efficiency, "first_ratio": ratio}

    return Work(call, 0, check, sum(batch.response_lengths), lambda: stages)


class _Watch:
    """CPU seconds of each stage."""

    def __init__(self, stages: dict[str, float]) -> None:
        self.stages, self.at = stages, time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.stages[name], self.at = now - self.at, now


def _outcomes(trajectories: list[Trajectory], mesh: Any) -> Any:
    """By the last token's id, as the peer's."""
    count = len(trajectories)
    scores = np.array([t.response_ids[-1] % 7 for t in trajectories], np.float32)
    flags = np.zeros(count, bool)
    numbers = np.arange(count, dtype=np.int32)
    outcomes = Outcomes(scores=scores, groups=numbers, truncated=flags, positive=flags)
    return place(outcomes, replicated(mesh))
