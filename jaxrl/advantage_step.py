"""The second pure step: from scores and anchors to advantages, returns and weights.

Runs once every micro-batch's anchors are back in place, over all policy tokens of the iteration, so
that whitening and group statistics are those of the whole batch however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.advantages import adaptive_lambda, gae
from jaxrl.config import AlgorithmConfig
from jaxrl.groups import group_advantages, whiten_groups
from jaxrl.losses import explained_variance, kl_estimate
from jaxrl.ratios import importance_weights, within_bounds
from jaxrl.reduce import masked_mean, whiten
from jaxrl.rewards import token_rewards
from jaxrl.segments import segment_totals
from jaxrl.types import Anchors, Outcomes, PackedBatch, TrainBatch

__all__ = ["make_advantage_step"]

Metrics = dict[str, jax.Array]


def make_advantage_step(
    algorithm: AlgorithmConfig, *, num_groups: int
) -> Callable[..., tuple[TrainBatch, Metrics]]:
    """Build ``advantage_step(packed, anchors, outcomes, kl_coef) -> (TrainBatch, metrics)``.

    The score of a trajectory sits on its last step, other rewards where `packed` has them, the KL
    penalty on every policy token; then GAE within each trajectory, returns-to-go, or the
    group-relative total; then whitening. Entries of `outcomes` no slot refers to are ignored.
    """

    def advantage_step(
        packed: PackedBatch, anchors: Anchors, outcomes: Outcomes, kl_coef: jax.Array
    ) -> tuple[TrainBatch, Metrics]:
        valid, owner = packed.policy_valid, packed.trajectory
        rewards = _rewards(algorithm, packed, anchors, outcomes, kl_coef)
        if algorithm.advantage_mode == "gae":
            advantages, returns = _estimated(algorithm, packed, anchors, outcomes, rewards)
        elif algorithm.advantage_mode == "returns":
            advantages = gae(
                rewards,
                jnp.zeros_like(rewards),
                packed.policy_steps,
                gamma=algorithm.gamma,
                lam=1.0,
                segment_ids=packed.policy_segments,
            ).advantages
            returns = jnp.zeros_like(rewards)
        else:
            advantages = _relative(algorithm, packed, outcomes, rewards, num_groups)
            returns = jnp.zeros_like(rewards)
        if algorithm.whitening == "batch":
            advantages = whiten(advantages, valid)
        elif algorithm.whitening == "group":
            advantages = whiten_groups(advantages, valid, outcomes.groups[owner], num_groups)
        weights, corrections = _weights(algorithm, packed, anchors)
        old_logprobs = anchors.old_logprobs
        if algorithm.old_logprobs == "rollout":
            old_logprobs = jnp.where(valid, packed.behaviour_logprobs, 0.0)
        batch = TrainBatch(
            packed=packed,
            old_logprobs=old_logprobs,
            old_values=anchors.old_values,
            ref_logprobs=anchors.ref_logprobs,
            advantages=lax.stop_gradient(jnp.where(valid, advantages, 0.0)),
            returns=lax.stop_gradient(jnp.where(valid, returns, 0.0)),
            weights=weights,
            positive=valid & outcomes.positive[owner],
        )
        return batch, _batch_metrics(batch, anchors) | corrections

    return advantage_step


def _rewards(
    algorithm: AlgorithmConfig,
    packed: PackedBatch,
    anchors: Anchors,
    outcomes: Outcomes,
    kl_coef: jax.Array,
) -> jax.Array:
    """Reward of each step."""
    kl, coef = None, jnp.float32(0.0)
    if algorithm.kl_in == "reward":
        coef = kl_coef
        kl = kl_estimate(
            anchors.old_logprobs,
            anchors.ref_logprobs,
            kind=algorithm.kl_kind,
            mask=packed.policy_valid,
        )
    at_the_end = token_rewards(
        outcomes.scores[packed.trajectory],
        packed.policy_valid,
        kl=kl,
        kl_coef=coef if kl is not None else 0.0,
        segment_ids=packed.policy_segments,
        score_mask=packed.policy_steps,
    )
    return at_the_end + packed.rewards


def _estimated(
    algorithm: AlgorithmConfig,
    packed: PackedBatch,
    anchors: Anchors,
    outcomes: Outcomes,
    rewards: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """GAE's advantages, and the critic's targets, which may have a lambda of their own."""
    steps, segments = packed.policy_steps, packed.policy_segments
    bootstrap = None
    if algorithm.truncated == "bootstrap":
        # The slot behind the last step is the state after it.
        after = jnp.concatenate(
            [anchors.old_values[..., 1:], jnp.zeros_like(anchors.old_values[..., :1])], axis=-1
        )
        bootstrap = jnp.where(outcomes.truncated[packed.trajectory], after, 0.0)

    def with_lambda(lam: jax.Array | float) -> tuple[jax.Array, jax.Array]:
        return gae(
            rewards,
            anchors.old_values,
            steps,
            gamma=algorithm.gamma,
            lam=lam,
            bootstrap=bootstrap,
            segment_ids=segments,
        )

    policy_lam: jax.Array | float = algorithm.lam
    if algorithm.lam_alpha is not None:
        lengths = segment_totals(steps.astype(jnp.float32), segments)
        policy_lam = adaptive_lambda(lengths, algorithm.lam_alpha)
    value_lam = algorithm.lam if algorithm.value_lam is None else algorithm.value_lam
    advantages, returns = with_lambda(policy_lam)
    if algorithm.lam_alpha is not None or value_lam != algorithm.lam:
        returns = with_lambda(value_lam)[1]
    return advantages, returns


def _relative(
    algorithm: AlgorithmConfig,
    packed: PackedBatch,
    outcomes: Outcomes,
    rewards: jax.Array,
    num_groups: int,
) -> jax.Array:
    """The trajectory's total reward, relative to its group, on each of its policy tokens."""
    valid, owner = packed.policy_valid, packed.trajectory
    totals = jnp.zeros_like(outcomes.scores).at[owner].add(rewards)
    present = jnp.zeros(outcomes.scores.shape, bool).at[owner].max(valid)
    relative = group_advantages(
        totals, outcomes.groups, num_groups, scale=algorithm.group_scale, mask=present
    )
    return jnp.where(valid, relative[owner], 0.0)


def _weights(
    algorithm: AlgorithmConfig, packed: PackedBatch, anchors: Anchors
) -> tuple[jax.Array, Metrics]:
    """Factor on each token's policy loss for samples of another policy, with its statistics."""
    valid, segments = packed.policy_valid, packed.policy_segments
    weights, metrics = valid.astype(jnp.float32), {}
    given = (anchors.old_logprobs, packed.behaviour_logprobs, valid)
    if algorithm.importance != "off":
        level, cap = algorithm.importance, algorithm.importance_cap
        weights = importance_weights(*given, level=level, cap=cap, segment_ids=segments)
        metrics["importance/capped_fraction"] = masked_mean(weights >= cap, valid)
    if algorithm.rejection != "off":
        kept = within_bounds(
            *given,
            low=algorithm.rejection_low,
            high=algorithm.rejection_high,
            level=algorithm.rejection,
            segment_ids=segments,
        )
        weights = jnp.where(kept, weights, 0.0)
        metrics["importance/rejected_fraction"] = masked_mean(~kept, valid)
    if metrics:
        total, square = jnp.sum(weights), jnp.sum(jnp.square(weights))
        metrics["importance/weight_mean"] = masked_mean(weights, valid)
        metrics["importance/weight_max"] = jnp.max(weights)
        metrics["importance/weight_min"] = jnp.min(jnp.where(valid, weights, jnp.inf))
        # Kish's effective sample size over the number of tokens.
        size = jnp.square(total) / jnp.maximum(square * jnp.sum(valid), 1e-30)
        metrics["importance/effective_fraction"] = size
    return lax.stop_gradient(weights), metrics


def _batch_metrics(batch: TrainBatch, anchors: Anchors) -> Metrics:
    """Figures of the whole rollout batch, over policy tokens only."""
    valid = batch.packed.policy_valid
    drift = jnp.where(valid, anchors.old_logprobs - batch.packed.behaviour_logprobs, 0.0)
    kl = kl_estimate(anchors.old_logprobs, batch.ref_logprobs, kind="k1", mask=valid)
    return {
        "policy/entropy": masked_mean(anchors.entropies, valid),
        "kl/reference": masked_mean(kl, valid),
        "kl/reference_sum": jnp.sum(kl),
        "value/mean": masked_mean(batch.old_values, valid),
        "value/return_mean": masked_mean(batch.returns, valid),
        "value/explained_variance": explained_variance(batch.old_values, batch.returns, valid),
        "rollout/logprob_diff_mean": masked_mean(jnp.abs(drift), valid),
        "rollout/logprob_diff_max": jnp.max(jnp.abs(drift), initial=0.0),
        "policy/tokens": jnp.sum(valid).astype(jnp.float32),
    }
