"""GAE, group advantages, returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl import gae, group_advantages, kl_estimate, masked_mean, token_rewards, whiten
from peers.recipe import At, Outputs, recipe


@recipe("verl.compute_gae_advantage_return")
def _(x: Any, p: dict) -> Outputs:
    """Skips masked steps as `gae` does; whitens with Bessel's correction."""
    m = x.response_mask
    a, returns = gae(x.token_level_rewards, x.values, m, gamma=p["gamma"], lam=p["lam"])
    return {
        "advantages_raw": At(a, m),
        "returns": At(returns, m),
        "advantages_whitened": At(whiten(a, m, ddof=1), m),
    }


@recipe("openrlhf.get_advantages_and_returns")
def _(x: Any, p: dict) -> Outputs:
    """Masked positions are steps of value and reward 0."""
    m = x.action_mask
    a, r = gae(x.rewards * m, x.values * m, np.ones_like(m), gamma=p["gamma"], lam=p["lambd"])
    return {"advantages": a, "returns": r}


@recipe("openrlhf.get_cumulative_returns")
def _(x: Any, p: dict) -> Outputs:
    r = x.rewards * x.action_mask
    return {"returns": gae(r, 0 * r, r == r, gamma=p["gamma"], lam=1.0).returns}


@recipe("skyrl.compute_gae_advantage_return")
def _(x: Any, p: dict) -> Outputs:
    """The recursion does not look at the mask; the whitening does."""
    r, v, m = x.token_level_rewards, x.values, x.response_mask
    a, returns = gae(r, v, np.ones_like(m), gamma=p["gamma"], lam=p["lambd"])
    return {"returns": returns, "advantages_whitened": At(whiten(a, m, ddof=1), m)}


@recipe("slime.vanilla_gae")
def _(x: Any, p: dict) -> Outputs:
    a, r = gae(x.rewards, x.values, x.values == x.values, gamma=p["gamma"], lam=p["lambd"])
    return {"advantages": a, "returns": r, "chunked_advantages": a, "chunked_returns": r}


@recipe("nemo.GeneralizedAdvantageEstimator.compute_advantage")
def _(x: Any, p: dict) -> Outputs:
    """One λ for the policy, 1 − 1 / (α · length) if adaptive, and one for the critic."""
    m = x.mask
    rewards = token_rewards(x.rewards, m)
    adaptive = p["length_adaptive_alpha"]
    lengths = np.maximum(m.sum(-1, keepdims=True), 1)
    lam = 1 - 1 / np.maximum(adaptive * lengths, 1) if adaptive else p["gae_lambda"]
    for_policy = lam if p["gae_lambda_policy"] is None else p["gae_lambda_policy"]
    for_critic = p["gae_lambda"] if p["gae_lambda_value"] is None else p["gae_lambda_value"]
    a = gae(rewards, x.values, m, gamma=p["gae_gamma"], lam=for_policy).advantages
    returns = gae(rewards, x.values, m, gamma=p["gae_gamma"], lam=for_critic).returns
    a = whiten(a, m, ddof=1) if p["normalize_advantages"] else a
    return {"advantages": At(a, m), "returns": At(returns, m), "token_level_rewards": rewards}


@recipe("unirl(own).compute_gae_advantages")
def _(x: Any, p: dict) -> Outputs:
    """A masked step ends the episode: every run of the mask is a segment."""
    a, r = gae(
        x.rewards, x.values, x.mask, gamma=p["gamma"], lam=p["gae_lambda"], segment_ids=x.mask * 1
    )
    return {"advantages": At(a, x.mask), "returns": At(r, x.mask)}


@recipe("unirl(own).Part.compute_gae_advantages")
def _(x: Any, p: dict) -> Outputs:
    """Trajectories packed in one row; the loss mask enters only the mean of each."""
    ids = np.repeat(np.arange(len(x.lengths)), x.lengths)
    everything = np.ones(len(ids), bool)
    rewards = token_rewards(x.rewards[ids], everything, segment_ids=ids)
    a, r = gae(
        rewards, x.values, everything, gamma=p["gamma"], lam=p["gae_lambda"], segment_ids=ids
    )
    means = [masked_mean(a, x.loss_mask & (ids == i)) for i in range(len(x.lengths))]
    return {
        "token_rewards": rewards,
        "token_advantages": a,
        "returns": r,
        "sample_advantages": means,
    }


@recipe("areal.PPOActor._compute_advantages")
def _(x: Any, p: dict) -> Outputs:
    """Position t describes token t + 1; a row that fills its width goes on from its last value."""
    t, length = np.arange(x.values.shape[1])[None], x.attention_mask.sum(-1)
    m, old = np.roll(x.loss_mask, -1, -1), np.roll(x.logprobs, -1, -1)
    cut_off = length == x.values.shape[1]
    scores = np.clip((x.rewards + p["reward_bias"]) * p["reward_scaling"], -20, 20)
    if p["mask_no_eos_with_zero"]:
        scores = np.where(cut_off, 0, scores)
    kl = kl_estimate(old, x.ref_logp, kind=p["kl_estimator"], mask=m)
    penalty = token_rewards(0 * scores, m, kl=kl, kl_coef=p["kl_ctl"])
    rewards = penalty + token_rewards(scores, m, score_mask=t <= length[:, None] - 2)
    bootstrap = (x.values[:, -1] * cut_off)[:, None]
    a, r = gae(rewards, x.values, m, gamma=p["discount"], lam=p["gae_lambda"], bootstrap=bootstrap)
    return {
        "advantages": At(a, m),
        "returns": At(r, m),
        "tot_rewards": rewards,
        "rolled_loss_mask": m,
        "kl_rewards": penalty,
    }


@recipe("trl.(own)ppo_rewards_gae")
def _(x: Any, p: dict) -> Outputs:
    """The score may sit one position after the last token, where the value still counts."""
    t = np.arange(x.values.shape[1])[None]
    last = x.sequence_lengths[:, None]
    m, with_next = t <= last, t <= np.minimum(last + 1, t.max())
    kl = kl_estimate(x.logprobs, x.ref_logprobs, kind=p["kl_estimator"], mask=m)
    rewards = token_rewards(x.scores, m, kl=kl, kl_coef=p["kl_coef"], score_mask=with_next)
    if p["whiten_rewards"]:
        rewards = whiten(rewards, with_next, shift_mean=False, ddof=1)
    a, r = gae(
        rewards, np.where(with_next, x.values, 0), np.ones_like(m), gamma=p["gamma"], lam=p["lam"]
    )
    return {
        "rewards": rewards,
        "advantages_raw": At(a, m),
        "advantages_whitened": At(whiten(a, m, ddof=1), m),
        "returns": At(r, with_next),
    }


@recipe("verl.compute_grpo_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    a = group_advantages(
        x.token_level_rewards.sum(-1), x.index, int(x.index.max()) + 1, ddof=1, eps=p["epsilon"]
    )
    return {"advantages": a[:, None] * x.response_mask}


@recipe("verl.compute_rloo_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    a = group_advantages(
        x.token_level_rewards.sum(-1), x.index, int(x.index.max()) + 1, scale="loo"
    )
    return {"advantages": a[:, None] * x.response_mask}


@recipe("verl.compute_reinforce_plus_plus_baseline_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    m, groups = x.response_mask, int(x.index.max()) + 1
    a = group_advantages(x.token_level_rewards.sum(-1), x.index, groups, scale="none")
    return {"advantages": whiten(np.broadcast_to(a[:, None], m.shape), m, ddof=1)}


@recipe("verl.compute_opo_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    """The baseline is the mean reward a token, not a response."""
    m, scores = x.response_mask, x.token_level_rewards.sum(-1, keepdims=True)
    same = x.index[:, None] == x.index[None]
    base = [masked_mean(np.broadcast_to(scores, m.shape), m & row[:, None]) for row in same]
    return {"advantages": (scores - np.array(base)[:, None]) * m}


@recipe("verl.compute_reinforce_plus_plus_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    r, m = x.token_level_rewards, x.response_mask
    returns = gae(r, 0 * r, m, gamma=p["gamma"], lam=1.0).returns
    return {"returns": At(returns, m), "advantages": whiten(returns, m, ddof=1)}


@recipe("verl.compute_remax_outcome_advantage")
def _(x: Any, p: dict) -> Outputs:
    r, m = x.token_level_rewards, x.response_mask
    returns = gae(r, 0 * r, m, lam=1.0).returns
    return {"returns": returns, "advantages": At(returns - x.reward_baselines[:, None], m)}
