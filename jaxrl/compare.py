"""SGLang against the trainer's own sampler: the same weights, the same prompts, the same update.

Sampling is greedy (top_k = 1, log-probabilities at temperature 1), so that both engines should say
the same tokens; where they do not, each is judged on its own: the trainer scores the tokens of each
engine. Rewards alternate between prompts and from round to round, so that each round makes a real
update whatever the model says (a prompt's samples are alike, so that rewards between them would
cancel out), and each round begins with publishing what the one before made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantage_step import make_advantage_step
from jaxrl.config import Config
from jaxrl.errors import ConfigError
from jaxrl.iteration import pack_for, plan_for
from jaxrl.rollout.engine import RolloutEngine
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.rollouts import rollout_seed
from jaxrl.setup import Run
from jaxrl.sharding import batch_sharding, row_multiple
from jaxrl.types import Outcomes, TrainState, Trajectory

__all__ = ["Row", "compare", "config_for_comparison", "faults", "table"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One engine in one round."""

    round: int
    engine: str
    loss: float
    """Policy and value loss of the update, before it."""
    ratio_mean: float
    """Mean of trained over old policy at the first update. The old log-probabilities are the ones
    that the engine reported (sglang) or those of the trainer's own pass (trainside)."""
    logprob_diff_mean: float
    """Mean |trainer - engine| over the engine's tokens, nats."""
    logprob_diff_max: float
    grad_norm: float
    """Of the policy's gradient, before clipping."""
    tokens: int
    same_tokens: float
    """Share of completions that both engines gave alike."""


def config_for_comparison(config: Config) -> Config:
    """`config` with one update an iteration, from the first on.

    Raises:
        ConfigError: The rollouts do not come from SGLang.
    """
    if config.rollout.engine != "sglang":
        raise ConfigError(
            f"rollout.engine={config.rollout.engine} leaves nothing to compare with trainside; "
            "set rollout.engine=sglang and rollout.urls"
        )
    return dataclasses.replace(
        config,
        algorithm=dataclasses.replace(
            config.algorithm, epochs=1, updates=1, old_logprobs="trainer"
        ),
        critic=dataclasses.replace(config.critic, warmup_iterations=0),
        rollout=dataclasses.replace(config.rollout, max_staleness=0, temperature=1.0),
    )


def compare(run: Run, state: TrainState, reference: Any, *, rounds: int) -> Iterator[Row]:
    """Two rows a round: the engine of `run`, whose update is kept, and the trainside sampler."""
    greedy = dataclasses.replace(run.sampling, temperature=0.0)
    trainside = TrainsideEngine(run.model, batch_size=run.config.rollout.batch_size)
    engines: dict[str, RolloutEngine] = {"sglang": run.engine, "trainside": trainside}
    steps = {
        name: make_advantage_step(
            dataclasses.replace(run.config.algorithm, old_logprobs=old),
            num_groups=run.config.rollout.prompts,
        )
        for name, old in (("sglang", "rollout"), ("trainside", "trainer"))
    }
    steps = {name: jax.jit(step) for name, step in steps.items()}
    for number in range(rounds):
        prompts = run.cursor.take(run.config.rollout.prompts)
        said: dict[str, list[Trajectory]] = {}
        for name, engine in engines.items():
            engine.publish(state.policy_params, number)
            said[name] = engine.generate(
                prompts,
                samples=run.config.rollout.samples,
                sampling=greedy,
                seed=rollout_seed(run.config.seed, number),
            )
        same = _same(*said.values())
        following = state
        for name in engines:
            before = jax.tree.map(jnp.copy, state)
            after, figures = _one_update(run, before, reference, said[name], steps[name], number)
            yield Row(round=number + 1, engine=name, same_tokens=same, **figures)
            if name == "sglang":
                following = after
        state = following


def _one_update(
    run: Run,
    state: TrainState,
    reference: Any,
    trajectories: Sequence[Trajectory],
    advantage: Any,
    number: int,
) -> tuple[TrainState, dict[str, Any]]:
    prompt = np.arange(len(trajectories), dtype=np.int32) // run.config.rollout.samples
    scores = np.where((prompt + number) % 2, 1.0, -1.0).astype(np.float32)
    groups = prompt // 2  # grpo: two prompts are compared with each other
    layout = plan_for(run.config, trajectories, row_multiple(run.mesh))
    packed = jax.device_put(pack_for(run.config, trajectories, layout), batch_sharding(run.mesh))
    anchors = run.steps.score(state.policy_params, state.value_params, reference, packed)
    outcomes = Outcomes(
        scores=scores,
        groups=groups,
        truncated=np.array([t.truncated for t in trajectories]),
        positive=scores > 0,
    )
    batch, drift = advantage(packed, anchors, outcomes, state.kl_coef)
    state, metrics = run.steps.update(state, jax.tree.map(lambda x: x[0], batch))
    return state, {
        "loss": float(metrics["loss"]),
        "ratio_mean": float(metrics["policy/ratio_mean"]),
        "logprob_diff_mean": float(drift["rollout/logprob_diff_mean"]),
        "logprob_diff_max": float(drift["rollout/logprob_diff_max"]),
        "grad_norm": float(metrics["policy/grad_norm"]),
        "tokens": sum(len(t.response_ids) for t in trajectories),
    }


def _same(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> float:
    ids = {(t.prompt.row, t.prompt.epoch, t.sample): t.response_ids for t in one}
    alike = [ids.get((t.prompt.row, t.prompt.epoch, t.sample)) == t.response_ids for t in other]
    return float(np.mean(alike))


def faults(rows: Sequence[Row], *, max_loss: float, max_logprob: float) -> list[str]:
    """What goes beyond the limits, in words; empty if nothing does.

    Args:
        rows: of `compare`.
        max_loss: largest difference of the losses of a round.
        max_logprob: largest mean difference of log-probabilities, nats.
    """
    found = []
    for row in rows:
        where = f"round {row.round}, {row.engine}"
        if not row.logprob_diff_mean <= max_logprob:
            found.append(f"{where}: mean |dlogp| {row.logprob_diff_mean:.2e} > {max_logprob:g}")
        if row.engine == "trainside" and row.ratio_mean != 1.0:
            found.append(f"{where}: first ratio {row.ratio_mean!r} is not exactly 1")
        if not row.grad_norm > 0:
            found.append(f"{where}: the gradient is {row.grad_norm}, so nothing was updated")
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        if not (gap := abs(one.loss - other.loss)) <= max_loss:
            found.append(f"round {one.round}: the losses differ by {gap:.2e} > {max_loss:g}")
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        "| round | rollout | loss | ratio mean | mean abs dlogp | max abs dlogp | gradient norm |"
        " tokens | same completions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.round} | {row.engine} | {row.loss:.6f} | {row.ratio_mean:.7f} | "
            f"{row.logprob_diff_mean:.1e} | {row.logprob_diff_max:.1e} | {row.grad_norm:.6f} | "
            f"{row.tokens} | {row.same_tokens:.3f} |"
        )
    return "\n".join(lines)
