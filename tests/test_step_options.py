"""Every option of `algorithm`: one loss and gradient, however the batch is laid out.

Each combination below is computed packed (samples sharing a prompt), padded (one a row) and one by
one (one a micro-batch), and by `dense_reference`, which knows neither rows nor masks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import dense_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stepping import (
    FORWARD,
    lay_out,
    make_outcomes,
    make_params,
    make_trajectories,
    one,
    prepare,
)

from jaxrl.config import AlgorithmConfig
from jaxrl.types import Trajectory

COMBINATIONS = {
    "vapo": AlgorithmConfig(
        lam_alpha=0.5, value_lam=1.0, nll_coef=0.3, clip_low=0.1, clip_high=0.28, gamma=0.97
    ),
    "every token of the response": AlgorithmConfig(
        gae_over="response", gamma=0.9, lam=0.8, whiten="group", value_clip=None, value_coef=0.7
    ),
    "bootstrap": AlgorithmConfig(
        truncated="bootstrap", gamma=0.95, whiten="off", kl_in="reward", kl_kind="abs", kl_coef=0.02
    ),
    "bootstrap over the response": AlgorithmConfig(
        truncated="bootstrap", gae_over="response", lam_alpha=0.3, value_clip=0.1, gamma=0.9
    ),
    "gspo": AlgorithmConfig(
        advantage_mode="grpo",
        ratio_level="sequence",
        clip_low=0.01,
        clip_high=0.02,
        aggregation="seq-mean-token-mean",
    ),
    "returns": AlgorithmConfig(
        advantage_mode="returns", gamma=0.9, dual_clip=1.5, entropy_coef=0.1, kl_in="report"
    ),
    "leave one out, k1 in the loss": AlgorithmConfig(
        advantage_mode="grpo",
        group_scale="loo",
        whiten="batch",
        kl_in="loss",
        kl_kind="k1",
        kl_weighted=True,
    ),
    "abs in the loss": AlgorithmConfig(
        advantage_mode="grpo", group_scale="none", kl_in="loss", kl_kind="abs", kl_coef=0.2
    ),
    "off-policy tokens": AlgorithmConfig(
        importance="token",
        importance_cap=1.2,
        rejection="token",
        rejection_low=0.1,
        rejection_high=4.0,
    ),
    "off-policy sequences": AlgorithmConfig(
        importance="sequence",
        rejection="sequence",
        rejection_low=0.001,
        rejection_high=100.0,
        aggregation="seq-mean-token-sum",
        kl_in="loss",
        kl_kind="k2",
    ),
    "the sampler's log-probabilities": AlgorithmConfig(
        old_logprobs="rollout",
        rejection="geometric",
        rejection_low=0.2,
        rejection_high=3.0,
        aggregation="seq-mean-token-sum-norm",
    ),
}
HOST_SIDE = {
    "overlong_buffer": "ending_scores",
    "overlong_penalty": "ending_scores",
    "missing_eos_penalty": "ending_scores",
    "nll_above": "outcomes.judge",
    "kl_target": "iteration",
    "kl_horizon": "iteration",
    "epochs": "iteration",
    "updates": "planning",
    "max_skipped_in_a_row": "trainer",
}
"""Read before or after the steps; tests of that module hold them."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"row": 64, "tokens": 256, "share": True},
    "padded": {"row": 16, "tokens": 16 * 8, "share": False},
    "one by one": {"row": 16, "tokens": 16, "share": False},
}


def trajectories() -> list[Trajectory]:
    """Eight, with tokens of somebody else's in between, cut and finished, rewarded on the way."""
    rng = np.random.default_rng(3)
    out = []
    for i, t in enumerate(make_trajectories(8)):
        rewards = np.where(rng.random(len(t.mask)) < 0.3, rng.normal(size=len(t.mask)), 0.0)
        mask = (*t.mask[:-1], i % 3 == 0) if any(t.mask[:-1]) else t.mask  # may end in a tool's
        out.append(
            dataclasses.replace(
                t,
                loss_mask=mask,
                rewards=tuple(rewards.tolist()),
                finish_reason="length" if i in (1, 2, 5) else "stop",
            )
        )
    return out


def gradients(state: Any) -> tuple[Any, Any]:
    """Of the first step: AdamW's first moment is a tenth of it, since nothing is clipped here."""
    return tuple(
        jax.tree.map(lambda m: m / 0.1, optax.tree.get(opt, "mu"))
        for opt in (state.policy_opt, state.value_opt)
    )


def moved_params() -> tuple[Any, Any]:
    """Near those that the anchors are made with, so that ratios are off 1 and clips bind."""
    return jax.tree.map(
        lambda x: x + 0.05 * jax.random.normal(jax.random.key(7), x.shape), make_params()
    )


def run(algorithm: AlgorithmConfig, layout: str) -> dict[str, Any]:
    """One update at moved parameters: gradients, metrics, and what the advantage step gave."""
    ts = trajectories()
    packed = lay_out(ts, algorithm=algorithm, **LAYOUTS[layout])
    state, update, batch, figures, _ = prepare(
        algorithm, ts, packed, forward=forward_of(algorithm), clip=0.0
    )
    policy, value = moved_params()
    state = dataclasses.replace(state, policy_params=policy, value_params=value)
    after, metrics = update(state, one(batch))
    valid, owner = np.asarray(packed.policy_valid), np.asarray(packed.trajectory)
    return {
        "gradients": gradients(after),
        "metrics": metrics,
        "figures": figures,
        "by trajectory": {
            name: [np.asarray(getattr(batch, name))[valid & (owner == i)] for i in range(len(ts))]
            for name in ("advantages", "returns", "weights", "old_values", "old_logprobs")
        },
    }


def forward_of(algorithm: AlgorithmConfig) -> Any:
    return FORWARD if algorithm.advantage_mode == "gae" else FORWARD._replace(values=None)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_layout_gives_the_numbers_of_the_dense_reference(name: str) -> None:
    algorithm = COMBINATIONS[name]
    results = {layout: run(algorithm, layout) for layout in LAYOUTS}
    for layout in ("padded", "one by one"):
        for kind in ("metrics", "figures", "by trajectory"):
            for a, b in zip(
                *map(jax.tree.leaves, (results["packed"][kind], results[layout][kind])), strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=f"{layout} {kind}")
        same_gradient(results["packed"]["gradients"], results[layout]["gradients"])

    ts = trajectories()
    old, ref = make_params(), make_params(seed=9)[0]
    anchors = dense_reference.anchors(ts, old, ref)
    dense = dense_reference.advantages_and_returns(algorithm, ts, make_outcomes(ts), *anchors)
    for i, t in enumerate(ts):
        for field, expected in zip(("advantages", "returns"), dense, strict=True):
            if field == "advantages" or algorithm.advantage_mode == "gae":
                got = results["packed"]["by trajectory"][field][i]
                np.testing.assert_allclose(
                    got, expected[i][np.array(t.mask)], rtol=1e-5, atol=1e-5, err_msg=field
                )

    def loss(policy: Any, value: Any) -> jax.Array:
        return dense_reference.objective(
            algorithm, ts, make_outcomes(ts), (policy, value), old, ref, horizon=8
        )

    expected, grads = jax.value_and_grad(loss, argnums=(0, 1))(*moved_params())
    np.testing.assert_allclose(results["packed"]["metrics"]["loss"], expected, rtol=1e-5, atol=1e-6)
    same_gradient(grads, results["packed"]["gradients"])


def same_gradient(one: Any, other: Any) -> None:
    """1e-5 of the largest entry of the tree."""
    one, other = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (one, other))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def test_every_option_is_in_some_combination() -> None:
    default = AlgorithmConfig()
    for field in dataclasses.fields(AlgorithmConfig):
        used = any(
            getattr(c, field.name) != getattr(default, field.name) for c in COMBINATIONS.values()
        )
        assert used != (field.name in HOST_SIDE), field.name


def test_the_batch_has_what_the_options_are_about() -> None:
    """Masked tokens inside and at the end, cut responses, rewards where no policy token is."""
    ts = trajectories()
    assert {t.finish_reason for t in ts} == {"stop", "length"}
    assert {t.mask[-1] for t in ts} == {True, False}
    assert any(r and not own for t in ts for r, own in zip(t.rewards, t.mask, strict=True))
    assert jnp.any(make_outcomes(ts).positive) and not jnp.all(make_outcomes(ts).positive)
