"""A forward of a few lines that is not ours, and batches for it: what the tests of steps share."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantage_step import make_advantage_step
from jaxrl.config import AlgorithmConfig, OptimizerConfig
from jaxrl.optim import make_optimizer
from jaxrl.packing import pack, plan, slot_counts
from jaxrl.steps import Forward, make_score_step, predicting_hidden
from jaxrl.types import Outcomes, PackedBatch, Prompt, TrainState, Trajectory
from jaxrl.update import make_update_step

VOCAB, WIDTH = 11, 6


def hidden_apply(
    params: Any, tokens: Any, positions: Any, segment_ids: Any, branch_ids: Any
) -> jax.Array:
    """A causal model without attention: a running sum of the embeddings a token sees."""
    same = segment_ids[..., :, None] == segment_ids[..., None, :]
    branch = branch_ids[..., None, :]
    same &= (branch == 0) | (branch == branch_ids[..., :, None])
    causal = jnp.tril(jnp.ones(same.shape, bool))
    embedded = params["embed"][tokens] * (1.0 + 0.01 * positions[..., None])
    return jnp.tanh(jnp.where(same & causal, 1.0, 0.0) @ embedded)


def values_apply(value_params: Any, hidden: jax.Array, packed: PackedBatch) -> jax.Array:
    return (predicting_hidden(hidden, packed) @ value_params["w"])[..., 0]


# Checkpoint-wrapped, as the decoder's layers are: scoring and training then agree to the bit.
FORWARD = Forward(jax.checkpoint(hidden_apply), lambda params: params["head"], values_apply)


def make_params(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = jax.random.split(jax.random.key(seed), 3)
    policy = {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "head": jax.random.normal(keys[1], (WIDTH, VOCAB)),
    }
    return policy, {"w": 0.3 * jax.random.normal(keys[2], (WIDTH, 1))}


def make_trajectories(count: int = 12, seed: int = 0, masks: bool = True) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    out: list[Trajectory] = []
    for i in range(count):
        prompt, response = (
            tuple(rng.integers(0, VOCAB, rng.integers(1, 5)).tolist()),
            rng.integers(1, 9),
        )
        mask = rng.random(response) < 0.7 if masks else np.ones(response, bool)
        mask[-1] = True
        out.append(
            Trajectory(
                prompt=Prompt(
                    row=i // 2,
                    ids=out[-1].prompt.ids if i % 2 else prompt,
                    text="",
                    columns={},
                ),
                sample=i % 2,
                response_ids=tuple(rng.integers(0, VOCAB, response).tolist()),
                logprobs=tuple((-rng.random(response)).tolist()),
                finish_reason="stop",
                loss_mask=tuple(mask.tolist()),
            )
        )
    return out


def lay_out(
    ts: list[Trajectory],
    *,
    tokens: int = 64,
    updates: int = 1,
    row: int = 16,
    share: bool = True,
    algorithm: AlgorithmConfig | None = None,
) -> PackedBatch:
    algorithm = algorithm or AlgorithmConfig()
    slots = {
        "every_token": algorithm.gae_over == "response",
        "end_state": algorithm.truncated == "bootstrap",
    }
    layout = plan(
        [len(t.prompt.ids) for t in ts],
        [len(t.response_ids) for t in ts],
        slot_counts(ts, **slots),
        updates=updates,
        micro_batch_tokens=tokens,
        row_lengths=[row],
        groups=[t.prompt.row for t in ts] if share else None,
    )
    return jax.tree.map(jnp.asarray, pack(ts, layout, **slots))


def make_state(
    algorithm: AlgorithmConfig, lr: float = 0.05, clip: float = 1.0
) -> tuple[TrainState, Any, Any]:
    policy, value = make_params()
    policy_optimizer, value_optimizer = (
        make_optimizer(
            OptimizerConfig(lr=lr, max_grad_norm=clip),
            100,
            lambda p: jax.tree.map(lambda _: True, p),
        )
        for _ in range(2)
    )
    state = TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=policy_optimizer.init(policy),
        value_opt=value_optimizer.init(value),
        updates=jnp.int32(0),
        iteration=jnp.int32(0),
        kl_coef=jnp.float32(algorithm.kl_coef),
        reward_moments=jnp.zeros(3),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )
    return state, policy_optimizer, value_optimizer


def make_outcomes(ts: list[Trajectory]) -> Outcomes:
    scores = np.random.default_rng(5).normal(size=len(ts)).astype(np.float32)
    return Outcomes(
        scores=jnp.asarray(scores),
        groups=jnp.arange(len(ts)) // 2,
        truncated=jnp.asarray([t.truncated for t in ts]),
        positive=jnp.asarray(scores > 0),
    )


@cache
def score_step(forward: Forward, chunk: int | None) -> Any:
    """Compiled once a shape, whatever the algorithm is."""
    return jax.jit(make_score_step(forward, chunk_size=chunk, temperature=0.7, with_reference=True))


def prepare(
    algorithm: AlgorithmConfig,
    ts: list[Trajectory],
    packed: PackedBatch,
    *,
    chunk: int | None = 4,
    forward: Forward = FORWARD,
    clip: float = 1.0,
) -> tuple[TrainState, Any, Any, Any, Any]:
    """State, compiled update, train batch, batch metrics, anchors."""
    state, policy_optimizer, value_optimizer = make_state(algorithm, clip=clip)
    score = score_step(forward, chunk)
    ref, _ = make_params(seed=9)
    anchors = score(state.policy_params, state.value_params, ref, packed)
    advantage = jax.jit(make_advantage_step(algorithm, num_groups=len(ts) // 2))
    batch, figures = advantage(packed, anchors, make_outcomes(ts), state.kl_coef)
    update = jax.jit(
        make_update_step(
            forward,
            algorithm,
            policy_optimizer,
            value_optimizer,
            chunk_size=chunk,
            temperature=0.7,
            horizon=8,
        )
    )
    return state, update, batch, figures, anchors


def one(batch: Any, update: int = 0) -> Any:
    return jax.tree.map(lambda x: x[update], batch)


def by_hand(ts: list[Trajectory], params: Any, value: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities and values of each trajectory's policy tokens, one by one, in float64."""
    out = []
    for t in ts:
        ids = np.asarray(t.ids)
        scale = 1.0 + 0.01 * np.arange(len(ids))[:, None]
        hidden = np.tanh(np.cumsum(np.asarray(params["embed"], np.float64)[ids] * scale, axis=0))
        logits = hidden @ np.asarray(params["head"], np.float64) / 0.7
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = len(t.prompt.ids) + np.flatnonzero(t.mask)
        out.append((logp[at - 1, ids[at]], (hidden @ np.asarray(value["w"]))[at - 1, 0]))
    return out
