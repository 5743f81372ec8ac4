"""Score, advantage and update steps with a forward of a few lines that is not ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stepping import (
    FORWARD,
    WIDTH,
    by_hand,
    hidden_apply,
    lay_out,
    make_params,
    make_state,
    make_trajectories,
    one,
    prepare,
)

from jaxrl.config import AlgorithmConfig
from jaxrl.steps import make_score_step
from jaxrl.types import PackedBatch, TrainState
from jaxrl.update import make_update_step


def test_anchors_equal_each_trajectory_alone():
    """LP-01, LP-02, GAE-16: a policy token is scored from the position before it."""
    ts = make_trajectories()
    packed = lay_out(ts)
    _, _, _, _, anchors = prepare(AlgorithmConfig(), ts, packed)
    policy, value = make_params()
    for i, (logp, values) in enumerate(by_hand(ts, policy, value)):
        here = np.asarray(packed.policy_valid & (packed.trajectory == i))
        np.testing.assert_allclose(np.asarray(anchors.old_logprobs)[here], logp, atol=1e-5)
        np.testing.assert_allclose(np.asarray(anchors.old_values)[here], values, atol=1e-5)
    masked = ~np.asarray(packed.policy_valid)
    assert masked.any()
    for field in dataclasses.fields(anchors):
        assert (np.asarray(getattr(anchors, field.name))[masked] == 0).all()


def test_gae_of_the_packed_batch_equals_each_trajectory_by_a_loop():
    algorithm = AlgorithmConfig(gamma=0.9, lam=0.8, whiten="off", kl_in="reward")
    ts = make_trajectories()
    packed = lay_out(ts)
    _, _, batch, _, anchors = prepare(algorithm, ts, packed)
    scores = np.random.default_rng(5).normal(size=len(ts))
    policy, value = make_params()
    ref = by_hand(ts, make_params(seed=9)[0], value)
    for i, (logp, values) in enumerate(by_hand(ts, policy, value)):
        rewards = -algorithm.kl_coef * (logp - ref[i][0])
        rewards[-1] += scores[i]
        running, expected = 0.0, np.zeros(len(logp))
        for t in reversed(range(len(logp))):
            following = values[t + 1] if t + 1 < len(logp) else 0.0
            delta = rewards[t] + 0.9 * following - values[t]
            running = delta + 0.9 * 0.8 * running
            expected[t] = running
        here = np.asarray(packed.policy_valid & (packed.trajectory == i))
        np.testing.assert_allclose(np.asarray(batch.advantages)[here], expected, atol=1e-5)
        np.testing.assert_allclose(np.asarray(batch.returns)[here], expected + values, atol=1e-5)


def test_gae12_whitening_sees_the_whole_batch():
    ts = make_trajectories()
    packed = lay_out(ts, updates=3, tokens=16)
    _, _, batch, _, _ = prepare(AlgorithmConfig(), ts, packed)
    valid = np.asarray(packed.policy_valid)
    adv = np.asarray(batch.advantages)[valid]
    assert packed.policy_valid.shape[:2] == (3, 2)
    np.testing.assert_allclose([adv.mean(), adv.std()], [0.0, 1.0], atol=1e-5)


def test_grpo_takes_the_groups_of_rows_not_of_texts():
    """DS-08: groups come from indices, so identical prompts in different rows stay apart."""
    algorithm = AlgorithmConfig(advantage_mode="grpo", group_scale="none")
    ts = make_trajectories(4)
    packed = lay_out(ts)
    _, _, batch, _, _ = prepare(algorithm, ts, packed)
    scores = np.random.default_rng(5).normal(size=4).astype(np.float32)
    expected = scores - scores.reshape(2, 2).mean(1).repeat(2)
    valid = np.asarray(packed.policy_valid)
    owner = np.asarray(packed.trajectory)[valid]
    np.testing.assert_allclose(np.asarray(batch.advantages)[valid], expected[owner], atol=1e-6)


def test_first_update_has_ratio_exactly_one():
    ts = make_trajectories()
    state, update, batch, _, _ = prepare(AlgorithmConfig(), ts, lay_out(ts, tokens=32))
    _, metrics = update(state, one(batch))
    assert float(metrics["policy/ratio_mean"]) == 1.0
    assert float(metrics["policy/ratio_min"]) == float(metrics["policy/ratio_max"]) == 1.0
    assert float(metrics["policy/logprob_change_max"]) == 0.0
    assert float(metrics["policy/clip_fraction_up"] + metrics["policy/clip_fraction_down"]) == 0.0


def test_lp10_old_logprobs_are_the_trainers_or_the_samplers():
    """With the trainer's the ratio is 1 whatever the sampler says; with the sampler's it is not."""
    ts = make_trajectories()
    packed = lay_out(ts, tokens=32)
    told = np.asarray(packed.behaviour_logprobs)
    ratios = {}
    for who in ("trainer", "rollout"):
        state, update, batch, figures, anchors = prepare(
            AlgorithmConfig(old_logprobs=who), ts, packed
        )
        own = np.asarray(anchors.old_logprobs)
        valid = np.asarray(packed.policy_valid)
        np.testing.assert_array_equal(batch.old_logprobs, own if who == "trainer" else told)
        drift = np.abs(own - told)[valid]  # reported alike
        np.testing.assert_allclose(figures["rollout/logprob_diff_mean"], drift.mean(), rtol=1e-6)
        ratios[who] = float(update(state, one(batch))[1]["policy/ratio_mean"])
        if who == "rollout":
            first = valid[0]
            expected = np.exp(np.clip((own - told)[0][first], -20, 20)).mean()
            np.testing.assert_allclose(ratios[who], expected, rtol=1e-5)
    assert ratios["trainer"] == 1.0 != ratios["rollout"]


ALGORITHMS = {
    "default": AlgorithmConfig(),
    "every loss": AlgorithmConfig(
        entropy_coef=0.1, kl_in="loss", kl_kind="k2", dual_clip=3.0, importance="sequence"
    ),
    "sequence means": AlgorithmConfig(aggregation="seq-mean-token-mean", importance="token"),
    "sequence sums": AlgorithmConfig(aggregation="seq-mean-token-sum", value_clip=None),
    "sum norm": AlgorithmConfig(aggregation="seq-mean-token-sum-norm"),
    "grpo": AlgorithmConfig(advantage_mode="grpo", kl_in="reward"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_update_does_not_depend_on_how_the_batch_is_cut(name: str):
    """AG-02, AG-05, AG-07, AG-08: 1, 2, 4 and 8 micro-batches give the same parameters."""
    ts = make_trajectories(16)
    results = []
    cuts = (256, 128, 64, 32) if name == "default" else (256, 32)
    for tokens in cuts:  # fewer rows a micro-batch, more micro-batches
        packed = lay_out(ts, tokens=tokens, share=False)
        state, update, batch, _, _ = prepare(ALGORITHMS[name], ts, packed)
        for _ in range(3):  # away from ratio 1, so that the clips bind
            state, metrics = update(state, one(batch))
        results.append((packed.tokens.shape[1], state, metrics))
    assert [micros for micros, *_ in results] == ([1, 2, 4, 8] if len(cuts) == 4 else [1, 8])
    for _, state, metrics in results[1:]:
        for a, b in zip(
            jax.tree.leaves((state, metrics)), jax.tree.leaves(results[0][1:]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_packed_equals_padded_equals_shared():
    """Several a row, one a row, and one copy of the prompt for its samples: the same step."""
    ts = make_trajectories(8)
    outcomes = []
    for row, tokens, share in ((64, 256, False), (16, 16 * 8, False), (64, 256, True)):
        packed = lay_out(ts, row=row, tokens=tokens, share=share)
        state, update, batch, figures, _ = prepare(AlgorithmConfig(), ts, packed)
        state, metrics = update(state, one(batch))
        outcomes.append((state, metrics, figures))
    for other in outcomes[1:]:
        for a, b in zip(*map(jax.tree.leaves, (outcomes[0], other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_loss_and_gradient_equal_a_dense_reference():
    """The whole objective written once more, dense, trajectory by trajectory, with autodiff."""
    algorithm = AlgorithmConfig(entropy_coef=0.1, clip_low=0.1, clip_high=0.3, value_clip=0.1)
    ts = make_trajectories(10)
    packed = lay_out(ts)
    state, update, batch, _, anchors = prepare(algorithm, ts, packed)
    moved, _ = update(state, one(batch))  # the second step has ratios other than 1
    valid = np.asarray(packed.policy_valid)
    owner = np.asarray(packed.trajectory)

    def pick(x: Any, i: int) -> Any:
        return jnp.asarray(np.asarray(x)[valid & (owner == i)])

    def objective(policy: Any, value: Any) -> jax.Array:
        total = 0.0
        for i, t in enumerate(ts):
            ids = jnp.asarray(t.ids)
            seg = jnp.ones_like(ids)
            hidden = hidden_apply(policy, ids, jnp.arange(len(ids)), seg, seg)
            at = len(t.prompt.ids) + np.flatnonzero(t.mask)
            logp_all = jax.nn.log_softmax(hidden[at - 1] @ policy["head"] / 0.7)
            logp = logp_all[jnp.arange(len(at)), ids[at]]
            entropy = -jnp.sum(jnp.exp(logp_all) * logp_all, -1)
            v = (hidden[at - 1] @ value["w"])[:, 0]
            old_v, ret, adv = (
                pick(x, i) for x in (batch.old_values, batch.returns, batch.advantages)
            )
            ratio = jnp.exp(logp - pick(batch.old_logprobs, i))
            policy_loss = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 0.9, 1.3))
            clipped = old_v + jnp.clip(v - old_v, -0.1, 0.1)
            value_loss = 0.5 * jnp.maximum((v - ret) ** 2, (clipped - ret) ** 2)
            total += jnp.sum(policy_loss + 0.5 * value_loss - 0.1 * entropy)
        return total / valid.sum()

    loss, grads = jax.value_and_grad(objective, argnums=(0, 1))(
        moved.policy_params, moved.value_params
    )
    _, metrics = update(moved, one(batch))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["policy/grad_norm"], optax.tree.norm(grads[0]), rtol=1e-4)
    np.testing.assert_allclose(metrics["value/grad_norm"], optax.tree.norm(grads[1]), rtol=1e-4)


@pytest.mark.parametrize(("tokens", "micros"), [(256, 1), (32, 4)])
def test_an_update_without_policy_tokens_changes_nothing(tokens: int, micros: int):
    """AG-04: not even by weight decay or momentum."""
    ts = make_trajectories()
    packed = lay_out(ts, tokens=tokens, share=False)
    assert packed.tokens.shape[1] == micros
    state, update, batch, _, _ = prepare(AlgorithmConfig(), ts, packed)
    state, _ = update(state, one(batch))  # momentum is there
    empty = dataclasses.replace(
        batch.packed, policy_valid=jnp.zeros_like(batch.packed.policy_valid)
    )
    batch = dataclasses.replace(batch, positive=jnp.zeros_like(batch.positive))
    after, metrics = update(state, one(dataclasses.replace(batch, packed=empty)))
    for name in ("policy_params", "value_params", "policy_opt", "value_opt", "skipped"):
        for a, b in zip(
            jax.tree.leaves(getattr(state, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        ):
            assert (np.asarray(a) == np.asarray(b)).all(), name
    assert float(metrics["loss"]) == 0.0


def test_nf01_a_nan_skips_the_update_and_counts_it():
    ts = make_trajectories()
    state, update, batch, _, _ = prepare(AlgorithmConfig(), ts, lay_out(ts))
    first = tuple(np.argwhere(np.asarray(batch.packed.policy_valid))[0])
    poisoned = dataclasses.replace(batch, advantages=batch.advantages.at[first].set(jnp.nan))
    after, _ = update(state, one(poisoned))
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, 1)
    for name in ("policy_params", "value_params", "policy_opt", "value_opt"):
        for a, b in zip(
            jax.tree.leaves(getattr(state, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        ):
            assert (np.asarray(a) == np.asarray(b)).all(), name
    good, _ = update(after, one(batch))
    assert (int(good.skipped), int(good.skipped_in_a_row)) == (1, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(good.policy_params))


def test_pl06_poison_at_masked_places_changes_nothing():
    ts = make_trajectories()
    state, update, batch, _, _ = prepare(ALGORITHMS["every loss"], ts, lay_out(ts))
    clean, clean_metrics = update(state, one(batch))
    off = ~batch.packed.policy_valid
    for poison in (1e30, np.nan, -np.inf):
        bad = {
            name: jnp.where(off, poison, getattr(batch, name))
            for name in ("old_logprobs", "old_values", "ref_logprobs", "advantages", "returns")
        }
        packed = dataclasses.replace(
            batch.packed,
            behaviour_logprobs=jnp.where(off, poison, batch.packed.behaviour_logprobs),
            policy_targets=jnp.where(off, -7, batch.packed.policy_targets),
        )
        dirty, metrics = update(state, one(dataclasses.replace(batch, packed=packed, **bad)))
        for a, b in zip(
            jax.tree.leaves((clean, clean_metrics)), jax.tree.leaves((dirty, metrics)), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_critic_warm_up_moves_the_critic_alone():
    ts = make_trajectories()
    _, _, batch, _, _ = prepare(AlgorithmConfig(), ts, lay_out(ts))
    state, policy_optimizer, value_optimizer = make_state(AlgorithmConfig())
    update = jax.jit(
        make_update_step(
            FORWARD,
            AlgorithmConfig(),
            policy_optimizer,
            value_optimizer,
            chunk_size=None,
            temperature=0.7,
            horizon=8,
            warmup_iterations=2,
        )
    )
    frozen, metrics = update(dataclasses.replace(state, iteration=jnp.int32(1)), one(batch))
    assert float(metrics["policy/lr"]) == 0.0 and float(metrics["value/lr"]) > 0.0
    np.testing.assert_array_equal(frozen.policy_params["embed"], state.policy_params["embed"])
    assert (frozen.value_params["w"] != state.value_params["w"]).any()
    moving, _ = update(dataclasses.replace(state, iteration=jnp.int32(2)), one(batch))
    assert (moving.policy_params["embed"] != state.policy_params["embed"]).any()


def test_stepping_twice_from_one_state_gives_the_same_bits_and_one_compilation():
    ts = make_trajectories()
    state, update, batch, _, _ = prepare(AlgorithmConfig(), ts, lay_out(ts))
    a, b = update(state, one(batch)), update(state, one(batch))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert update._cache_size() == 1


def test_kl01_a_kl_loss_brings_the_policy_back():
    algorithm = AlgorithmConfig(
        advantage_mode="grpo", kl_in="loss", kl_kind="k2", kl_coef=1.0, group_scale="none"
    )
    ts = make_trajectories(masks=False)
    packed = lay_out(ts)
    state, update, batch, _, _ = prepare(algorithm, ts, packed)
    batch = dataclasses.replace(batch, advantages=jnp.zeros_like(batch.advantages))
    score = jax.jit(make_score_step(FORWARD, chunk_size=4, temperature=0.7, with_reference=True))
    ref, _ = make_params(seed=9)

    def distance(state: TrainState) -> float:
        anchors = score(state.policy_params, state.value_params, ref, packed)
        return float(jnp.sum((anchors.old_logprobs - anchors.ref_logprobs) ** 2))

    before = distance(state)
    for _ in range(5):
        state, _ = update(state, one(batch))
    assert distance(state) < before


def test_pl05_an_entropy_bonus_raises_entropy():
    algorithm = AlgorithmConfig(entropy_coef=1.0, advantage_mode="grpo")
    ts = make_trajectories()
    packed = lay_out(ts)
    state, update, batch, _, anchors = prepare(algorithm, ts, packed)
    batch = dataclasses.replace(batch, advantages=jnp.zeros_like(batch.advantages))
    state, _ = update(state, one(batch))
    score = jax.jit(make_score_step(FORWARD, chunk_size=4, temperature=0.7, with_reference=False))
    after = score(state.policy_params, state.value_params, None, packed)
    assert float(after.entropies.sum()) > float(anchors.entropies.sum())


def test_a_critic_with_its_own_trunk_has_its_own_turn_and_gets_the_same_step() -> None:
    """Policy, then critic, each over all micro-batches: as one pass that differentiates both."""

    def own(value_params: Any, hidden: Any, packed: PackedBatch) -> jax.Array:
        del hidden
        states = jax.nn.one_hot(packed.policy_targets % WIDTH, WIDTH)
        return jnp.tanh(states @ value_params["w"])[..., 0]

    algorithm = AlgorithmConfig(
        kl_in="loss", kl_coef=0.1, entropy_coef=0.01, nll_coef=0.2, aggregation="seq-mean-token-sum"
    )
    ts = make_trajectories()
    packed = lay_out(ts, tokens=16)
    assert packed.policy_valid.shape[1] > 1
    found = []
    for separate in (False, True):
        forward = FORWARD._replace(values=own, separate=separate)
        state, update, batch, _, _ = prepare(algorithm, ts, packed, forward=forward)
        found.append(update(state, one(batch)))
    (together, figures), (apart, same) = found
    assert figures.keys() == same.keys()
    for name, value in figures.items():
        np.testing.assert_allclose(same[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert figures["value/grad_norm"] > 0 and figures["policy/grad_norm"] > 0
    for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
