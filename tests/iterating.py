"""Whole iterations of the toy in `stepping`: rollouts are made up, everything else is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stepping import FORWARD, make_params

from jaxrl.advantage_step import make_advantage_step
from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.iteration import iterate
from jaxrl.progress import Progress
from jaxrl.rollouts import Batch
from jaxrl.scoring import Scores
from jaxrl.sharding import make_mesh
from jaxrl.state import make_optimizers
from jaxrl.steps import make_score_step
from jaxrl.stopping import StopSignal
from jaxrl.types import Prompt, TrainState, Trajectory
from jaxrl.update import make_update_step

LIMIT = 8


def toy_config(*overrides: str) -> Config:
    """Twelve responses of at most `LIMIT` tokens to six prompts."""
    return load_config(
        [],
        [
            *("model.path=x", "rollout.prompts=6", "rollout.samples=2"),
            *(f"rollout.max_new_tokens={LIMIT}", "rollout.temperature=0.7"),
            *("packing.micro_batch_tokens=64", "packing.row_lengths=[16]", "data.shuffle=false"),
            *("optim.policy.lr=0.05", "optim.value.lr=0.05", "logprob.chunk_size=4"),
            *overrides,
        ],
    )


def toy_state(config: Config) -> TrainState:
    policy, value = make_params()
    optimizers = make_optimizers(config)
    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=optimizers.policy.init(policy),
        value_opt=optimizers.value.init(value),
        updates=jnp.int32(0),
        iteration=jnp.int32(0),
        kl_coef=jnp.float32(config.algorithm.kl_coef),
        reward_moments=jnp.zeros(3),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


@cache
def _score_step(temperature: float, chunk_size: int | None, with_reference: bool) -> Any:
    return jax.jit(
        make_score_step(
            FORWARD, chunk_size=chunk_size, temperature=temperature, with_reference=with_reference
        )
    )


def toy_steps(config: Config) -> SimpleNamespace:
    """The three steps for the toy, given what `setup` gives them for a real model."""
    temperature, chunk_size = config.rollout.temperature, config.logprob.chunk_size
    forward = FORWARD if config.needs_critic else FORWARD._replace(values=None)
    optimizers = make_optimizers(config)
    update = make_update_step(
        forward,
        config.algorithm,
        optimizers.policy,
        optimizers.value,
        chunk_size=chunk_size,
        temperature=temperature,
        horizon=config.rollout.max_new_tokens,
        warmup_iterations=config.critic.warmup_iterations,
    )
    return SimpleNamespace(
        score=_score_step(temperature, chunk_size, config.needs_reference),
        advantage=jax.jit(make_advantage_step(config.algorithm, num_groups=config.rollout.prompts)),
        update=jax.jit(update),
    )


def made_up(count: int, seed: int = 0) -> tuple[list[Trajectory], Scores]:
    """Two responses a prompt with their scores; tool tokens in some, a few cut by the limit."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for i in range(count):
        if i % 2 == 0:
            prompt = Prompt(
                row=i // 2, ids=tuple(rng.integers(0, 11, 3).tolist()), text="", columns={}
            )
        length = LIMIT if i % 4 == 1 else int(rng.integers(2, LIMIT))
        own = rng.random(length) < 0.7
        own[[0, -1]] = True
        trajectories.append(
            Trajectory(
                prompt=prompt,
                sample=i % 2,
                response_ids=tuple(rng.integers(0, 11, length).tolist()),
                logprobs=tuple(np.where(own, -1.5 - 2 * rng.random(length), 0.0).tolist()),
                finish_reason="length" if length == LIMIT else "stop",
                loss_mask=tuple(own.tolist()),
            )
        )
    values = rng.normal(1.0, 1.0, count).astype(np.float32)
    return trajectories, Scores(values, np.ones(count, bool), {})


def iterations(
    config: Config, batches: Sequence[tuple[list[Trajectory], Scores]]
) -> tuple[TrainState, list[dict[str, float]]]:
    """Run `iterate` on these batches; the last state and the metrics of each iteration."""
    return iterations_of(
        config,
        batches,
        steps=toy_steps(config),
        state=toy_state(config),
        reference=make_params(seed=9)[0],
        mesh=make_mesh(config.mesh),
    )


def iterations_of(
    config: Config,
    batches: Sequence[tuple[list[Trajectory], Scores]],
    *,
    steps: Any,
    state: TrainState,
    reference: Any,
    mesh: Any,
) -> tuple[TrainState, list[dict[str, float]]]:
    """The same with any steps."""
    numbered = iter(batches)

    def take(iteration: int, on_done: Any) -> Batch:
        trajectories, scores = next(numbered)
        trajectories = [replace(t, weight_version=iteration) for t in trajectories]
        prompts = list({t.prompt.row: t.prompt for t in trajectories}.values())
        return Batch(prompts, trajectories, scores, {}, {})

    run: Any = SimpleNamespace(
        config=config,
        mesh=mesh,
        steps=steps,
        rollouts=SimpleNamespace(take=take),
        engine=SimpleNamespace(rest=lambda: None, figures=dict),
    )
    metrics = []
    for _ in batches:
        progress, stop = Progress(len(batches), enabled=False), StopSignal()
        result = iterate(run, state, reference if config.needs_reference else None, progress, stop)
        state = result.state
        metrics.append(result.metrics)
    return state, metrics
