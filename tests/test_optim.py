"""Schedules by hand, clipping of the whole gradient, decay masks, float32 masters."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config import OptimizerConfig, PackingConfig
from jaxrl.config_io import load_config
from jaxrl.optim import make_optimizer, make_schedule, steps_taken
from jaxrl.state import _decayed, make_optimizers


def rates(total: int, steps: list[int], **settings: object) -> list[float]:
    schedule = make_schedule(OptimizerConfig(lr=1.0, **settings), total)  # type: ignore[arg-type]
    return [float(schedule(step)) for step in steps]


def test_ag10_a_linear_schedule_is_half_way_down_at_half_the_optimizer_steps():
    """100 rollouts x 2 epochs x 4 updates are 800 optimizer steps, however many micro-batches."""
    config = load_config(
        [],
        [
            *("model.path=x", "iterations=100", "algorithm.epochs=2", "algorithm.updates=4"),
            *("optim.policy.schedule=linear", "optim.policy.lr=1", "critic.warmup_iterations=0"),
        ],
    )
    assert config.optimizer_steps == 800
    policy = make_optimizers(config).policy
    assert float(policy.schedule(400)) == pytest.approx(0.5)
    assert float(policy.schedule(800)) == 0.0


def test_the_policys_horizon_leaves_the_critics_warm_up_out():
    config = load_config(
        [],
        [
            *("model.path=x", "iterations=10", "critic.warmup_iterations=2"),
            *("optim.policy.schedule=linear", "optim.value.schedule=linear"),
        ],
    )
    policy, value = make_optimizers(config)
    assert float(policy.schedule(8)) == 0.0 < float(value.schedule(8))


def test_warm_up_and_decay_by_hand():
    # 3 warm-up steps: 1/4, 2/4, 3/4, then the peak; linear over the 4 steps that are left of 7.
    assert rates(7, [0, 1, 2, 3, 5, 7], schedule="linear", warmup_steps=3) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    )
    assert rates(4, [0, 2, 4], schedule="cosine", min_lr_ratio=0.2) == pytest.approx(
        [1.0, 0.6, 0.2]
    )
    assert rates(4, [0, 100], schedule="constant") == [1.0, 1.0]


def test_ag08_the_whole_gradient_is_clipped_not_its_parts():
    # [3, 0] and [0, 4] sum to norm 5; clipped to 1 the direction is (.6, .8), not (.5, .5).
    config = OptimizerConfig(lr=1.0, max_grad_norm=1.0)
    params = {"w": jnp.zeros(2)}
    seen = {}

    def spy(updates: dict, state: tuple, params: object = None) -> tuple:
        seen.update(updates)
        return updates, state

    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.GradientTransformation(lambda _: (), spy),
    )
    chain.update({"w": jnp.array([3.0, 4.0])}, chain.init(params))
    np.testing.assert_allclose(seen["w"], [0.6, 0.8], rtol=1e-6)
    # Through AdamW the first step is sign-like; its second moment tells the clipped size.
    optimizer = make_optimizer(config, 10, lambda p: {"w": False})
    _, state = optimizer.update({"w": jnp.array([3.0, 4.0])}, optimizer.init(params), params)
    moment = optax.tree_utils.tree_get(state, "nu")["w"]
    np.testing.assert_allclose(moment, (1 - 0.99) * np.array([0.36, 0.64]), rtol=1e-5)
    assert int(steps_taken(state)) == 1


def test_norms_and_biases_do_not_decay():
    params = {
        "embed": {"weight": 1},
        "layers": {
            "attention": {"q": {"kernel": 1, "bias": 1}, "q_norm": {"scale": 1}},
            "attention_norm": {"scale": 1},
            "mlp": {"up": {"kernel": 1}},
        },
        "norm": {"scale": 1},
    }
    assert _decayed(params) == {
        "embed": {"weight": True},
        "layers": {
            "attention": {"q": {"kernel": True, "bias": False}, "q_norm": {"scale": False}},
            "attention_norm": {"scale": False},
            "mlp": {"up": {"kernel": True}},
        },
        "norm": {"scale": False},
    }
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(config, 10, lambda p: {"a": True, "b": False})
    values = {"a": jnp.ones(1), "b": jnp.ones(1)}
    zeros = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    updates, _ = optimizer.update(zeros, optimizer.init(values), values)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.05, 0.0])


def test_nf04_a_thousand_small_steps_add_up_in_the_float32_master():
    """bfloat16 spacing below 1 is .0039: a bf16 weight would not move."""
    optimizer = make_optimizer(
        OptimizerConfig(lr=1e-5, max_grad_norm=0.0), 1000, lambda p: {"w": False}
    )
    params = {"w": jnp.ones(())}
    state = optimizer.init(params)
    for _ in range(1000):
        updates, state = optimizer.update({"w": jnp.ones(())}, state, params)
        params = optax.apply_updates(params, updates)
    assert abs(float(params["w"]) - 0.99) < 1e-4


def test_the_default_rows_are_buckets_in_order():
    assert sorted(PackingConfig().row_lengths) == PackingConfig().row_lengths
