"""What the tests of checkpoints share: states, an update, saving, comparing to the bit."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.checkpoint.state import CheckpointStore
from jaxrl.types import TrainState

policy_optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        optax.linear_schedule(0.0, 1e-2, 10),
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    ),
)
value_optimizer = optax.adam(1e-2)


def make_state(seed: int, width: int = 4) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 3)
    policy = {
        "embed": jax.random.normal(keys[0], (8, width)),
        "layers": {"kernel": jax.random.normal(keys[1], (2, width, width)), "bias": jnp.zeros(3)},
    }
    value = {"value_head": {"kernel": jax.random.normal(keys[2], (width, 1)), "bias": jnp.zeros(1)}}
    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=policy_optimizer.init(policy),
        value_opt=value_optimizer.init(value),
        updates=jnp.int32(0),
        iteration=jnp.int32(0),
        kl_coef=jnp.float32(0.1),
        reward_moments=jnp.zeros(3),
        skipped=jnp.int32(0),
        skipped_in_a_row=jnp.int32(0),
    )


def numbered_state(step: int) -> TrainState:
    """A state full of its step, made without compiling anything."""
    full = {"kernel": np.full((256, 64), step, np.float32)}
    counters = ("updates", "iteration", "kl_coef", "reward_moments", "skipped", "skipped_in_a_row")
    return TrainState(
        policy_params=full,
        value_params=full,
        policy_opt=full,
        value_opt=full,
        **{name: np.array(step, np.int32) for name in counters},
    )


@partial(jax.jit, donate_argnums=0)
def train(state: TrainState) -> TrainState:
    """One update with made-up gradients that depend on everything, donating the state."""

    def moved(optimizer: Any, params: Any, opt: Any) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda x: jnp.sin(x + state.updates) * state.kl_coef, params)
        changes, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, changes), opt

    policy, policy_opt = moved(policy_optimizer, state.policy_params, state.policy_opt)
    value, value_opt = moved(value_optimizer, state.value_params, state.value_opt)
    return dataclasses.replace(
        state,
        policy_params=policy,
        policy_opt=policy_opt,
        value_params=value,
        value_opt=value_opt,
        updates=state.updates + 1,
        iteration=state.iteration + 1,
        kl_coef=state.kl_coef * 1.1,
    )


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def to_host(state: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: np.array(leaf), state)


def save(store: CheckpointStore, step: int, state: TrainState | None = None) -> None:
    store.save(step, state or make_state(step), {"cursor": {"epoch": 0, "row": step}})
    store.wait()
