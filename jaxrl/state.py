"""The train state: its shapes and shardings, how it starts, and the reference policy beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl.checkpoint.hf import load_params
from jaxrl.checkpoint.hf_classifier import load_classifier, load_trunk_config
from jaxrl.config import Config, CriticConfig
from jaxrl.critic import init_value_params
from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.optim import Optimizer, make_optimizer
from jaxrl.sharding import place, replicated, tree_shardings
from jaxrl.types import TrainState

__all__ = ["Optimizers", "abstract_state", "fresh_state", "make_optimizers", "reference_params"]


class Optimizers(NamedTuple):
    """One for each parameter tree."""

    policy: Optimizer
    value: Optimizer


def make_optimizers(config: Config) -> Optimizers:
    """Both optimizers; the policy's schedule starts after the critic's warm-up."""
    total = config.optimizer_steps
    frozen = config.critic.warmup_iterations * config.algorithm.epochs * config.algorithm.updates
    return Optimizers(
        make_optimizer(config.optim.policy, max(total - frozen, 1), _decayed),
        make_optimizer(config.optim.value, total, _decayed),
    )


def _decayed(params: Any) -> Any:
    """Which parameters weight decay applies to: matrices, not norms and biases."""

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        del leaf
        names = [str(getattr(entry, "key", entry)) for entry in path]
        return not any("norm" in name or "bias" in name for name in names)

    return jax.tree_util.tree_map_with_path(decays, params)


def _policy_shardings(model: Model, mesh: Mesh) -> dict[str, Any]:
    table = weight_table(model.config)
    return tree_shardings(mesh, ((w.path, w.full_shape, w.axes) for w in table))


def _value_shardings(config: Config, model: Model, mesh: Mesh) -> dict[str, Any]:
    if not config.needs_critic:
        return {}
    tree: dict[str, Any] = {"value_head": {"kernel": replicated(mesh), "bias": replicated(mesh)}}
    if config.critic.kind == "model":
        trunk = _policy_shardings(model, mesh)
        tree["trunk"] = {name: part for name, part in trunk.items() if name != "head"}
    return tree


def abstract_state(config: Config, model: Model, mesh: Mesh, optimizers: Optimizers) -> TrainState:
    """The state as shapes, dtypes and shardings; allocates nothing."""
    critic = config.critic if config.needs_critic else None

    def shapes() -> tuple[Any, Any]:
        policy = model.init(jax.random.key(0))
        return policy, init_value_params(model, critic, policy)

    policy, value = jax.eval_shape(shapes)
    whole = replicated(mesh)
    policy = _placed(policy, _policy_shardings(model, mesh))
    value = _placed(value, _value_shardings(config, model, mesh))

    def opt(optimizer: Optimizer, params: Any) -> Any:
        state = jax.eval_shape(optimizer.init, params)
        where = optax.tree_map_params(
            optimizer,
            lambda _, param: param.sharding,
            state,
            params,
            transform_non_params=lambda _: whole,
        )
        return _placed(state, where)

    def scalar(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), dtype, sharding=whole)

    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=opt(optimizers.policy, policy),
        value_opt=opt(optimizers.value, value),
        updates=scalar(jnp.int32),
        iteration=scalar(jnp.int32),
        kl_coef=scalar(jnp.float32),
        reward_moments=jax.ShapeDtypeStruct((3,), jnp.float32, sharding=whole),
        skipped=scalar(jnp.int32),
        skipped_in_a_row=scalar(jnp.int32),
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )


def fresh_state(config: Config, model: Model, mesh: Mesh, optimizers: Optimizers) -> TrainState:
    """The state before the first update: pretrained policy, the critic's start, empty moments."""
    like = abstract_state(config, model, mesh, optimizers)
    where = jax.tree.map(lambda leaf: leaf.sharding, like)
    policy = reference_params(config, model, mesh)
    critic = config.critic if config.needs_critic else None
    trunk, head, own = _trunk_of(policy), None, False
    if critic is not None and critic.kind == "model" and critic.path:
        trunk, head, own = *_critic_start(critic, model.config, where.value_params), True
    # A trunk that was read for the critic becomes its own; the policy's is copied on the devices.
    make = partial(init_value_params, model, critic)
    value = jax.jit(make, out_shardings=where.value_params, donate_argnums=(0,) if own else ())(
        trunk, head
    )

    def init(policy: Any, value: Any) -> tuple[Any, Any]:
        return optimizers.policy.init(policy), optimizers.value.init(value)

    policy_opt, value_opt = jax.jit(init, out_shardings=(where.policy_opt, where.value_opt))(
        policy, value
    )
    counters = {
        "updates": np.int32(0),
        "iteration": np.int32(0),
        "kl_coef": np.float32(config.algorithm.kl_coef),
        "reward_moments": np.zeros(3, np.float32),
        "skipped": np.int32(0),
        "skipped_in_a_row": np.int32(0),
    }
    return TrainState(
        policy_params=policy,
        value_params=value,
        policy_opt=policy_opt,
        value_opt=value_opt,
        **place(counters, replicated(mesh)),
    )


def _critic_start(
    critic: CriticConfig, config: ModelConfig, where: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Trunk, and the value head or None for a fresh one, from `critic.path`."""
    assert critic.path is not None
    _, kind = load_trunk_config(critic.path)
    shardings = {**where["trunk"], "value_head": where["value_head"]}
    if kind == "ForCausalLM":
        return load_params(critic.path, config, with_head=False, shardings=shardings), None
    params = load_classifier(critic.path, config, kind, shardings=shardings)
    return _trunk_of(params), params["value_head"] if critic.keep_head else None


def _trunk_of(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in params.items() if name not in ("head", "value_head")}


def reference_params(config: Config, model: Model, mesh: Mesh) -> Any:
    """The pretrained policy, always read from model.path: resuming never re-anchors it."""
    shardings = _policy_shardings(model, mesh)
    return load_params(config.model.path, model.config, shardings=shardings)
