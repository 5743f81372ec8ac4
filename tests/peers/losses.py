"""Policy and value losses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import (
    aggregate,
    explained_variance,
    importance_weights,
    kl_estimate,
    masked_mean,
    ppo_policy_loss,
    ppo_value_loss,
    sequence_log_ratio,
    within_bounds,
)
from peers.recipe import Outputs, mode, policy_case, recipe


@recipe("verl.compute_policy_loss_vanilla")
def _(x: Any, p: dict) -> Outputs:
    """The dual clip is always on; importance weights multiply what was clipped."""
    m, clip = x.response_mask, p["clip_ratio"]
    loss = lambda new: ppo_policy_loss(  # noqa: E731
        new,
        x.old_log_prob,
        x.advantages,
        clip_low=p.get("clip_ratio_low", clip),
        clip_high=p.get("clip_ratio_high", clip),
        dual_clip=p.get("clip_ratio_c", 3.0),
        mask=m,
    )
    weights = getattr(x, "rollout_is_weights", np.float32(1.0))
    result = loss(x.log_prob)
    return policy_case(
        x, p, lambda new: loss(new).per_token * weights, x.log_prob, m, "grad_log_prob"
    ) | {
        "actor/pg_clipfrac": masked_mean(result.clipped, m),
        "actor/pg_clipfrac_lower": masked_mean(result.dual_clipped, m),
        "actor/ppo_kl": masked_mean(kl_estimate(x.old_log_prob, x.log_prob, mask=m), m),
    }


def own_gradients(new: Any, old: Any, m: Any) -> jax.Array:
    """`sequence_log_ratio` where each token has the gradient of its own log-probability alone."""
    stop = jax.lax.stop_gradient
    return new - stop(new) + stop(sequence_log_ratio(new, old, m))


@recipe("verl.compute_policy_loss_gspo")
def _(x: Any, p: dict) -> Outputs:
    m = x.response_mask
    loss = lambda new: ppo_policy_loss(  # noqa: E731
        own_gradients(new, x.old_log_prob, m),
        np.zeros(m.shape),
        x.advantages,
        clip_low=p["clip_ratio_low"],
        clip_high=p["clip_ratio_high"],
        mask=m,
    )
    result = loss(x.log_prob)
    return policy_case(x, p, lambda new: loss(new).per_token, x.log_prob, m, "grad_log_prob") | {
        "actor/pg_clipfrac": masked_mean(result.clipped, m),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": masked_mean(kl_estimate(x.old_log_prob, x.log_prob, mask=m), m),
    }


@recipe("verl.compute_policy_loss_cispo")
def _(x: Any, p: dict) -> Outputs:
    """The clipped ratio weighs the gradient of the log-probability of every token."""
    m, low, high = x.response_mask, 1 - p["clip_ratio_low"], 1 + p["clip_ratio_high"]

    def per_token(new: jax.Array) -> jax.Array:
        ratio = importance_weights(new, x.old_log_prob, m, cap=high)
        return -jnp.maximum(ratio, low) * x.advantages.astype(np.float32) * new

    ratio = ppo_policy_loss(x.log_prob, x.old_log_prob, x.advantages, mask=m).ratio
    return policy_case(x, p, per_token, x.log_prob, m, "grad_log_prob") | {
        "actor/pg_clipfrac": masked_mean((ratio < low) | (ratio > high), m),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": masked_mean(kl_estimate(x.old_log_prob, x.log_prob, mask=m), m),
    }


@recipe("openrlhf.PolicyLoss")
def _(x: Any, p: dict) -> Outputs:
    m, old = x.action_mask, x.old_log_probs
    gspo = p.get("policy_loss_type") == "gspo"

    def loss(new: Any) -> Any:
        return ppo_policy_loss(
            sequence_log_ratio(new, old, m) if gspo else new,
            np.zeros(m.shape) if gspo else old,
            x.advantages,
            clip_low=p.get("clip_eps_low", 0.2),
            clip_high=p.get("clip_eps_high", 0.2),
            dual_clip=p.get("dual_clip"),
            mask=m,
        )

    weights, extra = np.float32(1.0), {}
    kind = p.get("vllm_is_correction_type")
    if kind:
        low, high = p["vllm_is_truncated_threshold"]
        level = "geometric" if kind == "seq-mask-tis" else "token"
        given = old, x.rollout_log_probs, m
        kept = within_bounds(*given, low=low, high=high, level=level)
        weights = jnp.where(kept, importance_weights(*given), 0.0)
        extra = {"vllm_kl": masked_mean(kl_estimate(x.rollout_log_probs, old, mask=m), m)}
    p = p | {"token_level_loss": p.get("token_level_loss", not gspo)}
    return policy_case(
        x, p, lambda new: loss(new).per_token * weights, x.log_probs, m, "grad_log_probs"
    ) | {
        "clip_ratio": masked_mean(loss(x.log_probs).clipped, m),
        "ppo_kl": masked_mean(kl_estimate(old, x.log_probs, mask=m), m),
        **extra,
    }


@recipe("slime.compute_policy_loss")
def _(x: Any, p: dict) -> Outputs:
    """Takes old − new."""
    loss = ppo_policy_loss(
        -x.ppo_kl,
        0 * x.ppo_kl,
        x.advantages,
        clip_low=p["eps_clip"],
        clip_high=p["eps_clip_high"],
        dual_clip=p["eps_clip_c"],
    )
    return {"pg_losses": loss.per_token, "clipfrac": loss.clipped}


@recipe("xtuner.pg_loss_fn")
def _(x: Any, p: dict) -> Outputs:
    """A weighted sum; the dual clip is always on."""

    def loss(new: jax.Array) -> jax.Array:
        per_token = ppo_policy_loss(
            new,
            x.old_log_prob,
            x.advantages,
            clip_low=p["cliprange_low"],
            clip_high=p["cliprange_high"],
            dual_clip=p.get("clip_ratio_c", 3.0),
        ).per_token
        return (per_token * x.loss_weights.astype(np.float32)).sum()

    value, gradient = jax.value_and_grad(loss)(x.log_prob.astype(np.float32))
    return {"loss": value, "grad_log_prob": gradient}


def logprob_change(x: Any, m: Any) -> Outputs:
    change = kl_estimate(x.new_logp, x.old_logp, kind="abs", mask=m)
    return {
        "rollout_replay_logp_absdiff_mean": masked_mean(change, m),
        "rollout_replay_logp_absdiff_max": change.max(),
    }


@recipe("unirl._grpo_clip_loss")
def _(x: Any, p: dict) -> Outputs:
    high = p["clip_range"] if p["clip_range_high"] is None else p["clip_range_high"]
    f = lambda new: ppo_policy_loss(  # noqa: E731
        new, x.old_logp, x.advantages, clip_low=p["clip_range"], clip_high=high
    )
    loss = f(x.new_logp)
    ratio, everything = loss.ratio, np.ones(x.new_logp.shape, bool)
    above, below = ratio > 1 + np.float32(high), ratio < 1 - np.float32(p["clip_range"])
    return {
        "loss_per_elem": loss.per_token,
        "grad_new_logp_of_mean": jax.grad(lambda new: f(new).per_token.mean())(
            x.new_logp.astype(np.float32)
        ),
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(ddof=1) if ratio.size > 1 else 0.0,
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "clip_fraction": masked_mean(above | below, everything),
        "clipfrac_gt_one": masked_mean(above, everything),
        "clipfrac_lt_one": masked_mean(below, everything),
        "approx_kl": masked_mean(kl_estimate(x.new_logp, x.old_logp, kind="k2"), everything),
        **logprob_change(x, everything),
    }


@recipe("areal.ppo_actor_loss_fn")
def _(x: Any, p: dict) -> Outputs:
    """Decoupled: the ratio is against the proximal policy, a behaviour weight multiplies."""
    m = x.loss_mask
    high = p.get("eps_clip_higher", p["eps_clip"])
    sequence = p.get("importance_sampling_level") == "sequence"
    prox, a = x.proximal_logprobs, x.advantages
    if sequence:
        a = np.broadcast_to(masked_mean(a, m, axis=-1)[:, None], m.shape)

    def loss(new: Any) -> Any:
        return ppo_policy_loss(
            sequence_log_ratio(new, prox, m) if sequence else new,
            np.zeros(m.shape) if sequence else prox,
            a,
            clip_low=p["eps_clip"],
            clip_high=high,
            mask=m,
        )

    weights = importance_weights(prox, x.old_logprobs, m)
    rule = p.get("rejection_sampling", {})
    gate = kl_estimate(x.old_logprobs, prox, kind="k3", mask=m) if "metric" in rule else weights
    kept = (gate <= rule.get("upper", np.inf)) & (gate >= rule.get("lower", -np.inf))
    weights = jnp.where(kept, weights, 0.0)
    result = loss(x.logprobs)
    return policy_case(
        x, p, lambda new: loss(new).per_token * weights, x.logprobs, m, "grad_logprobs"
    ) | {
        "clip_mask": result.clipped,
        "dual_clip_mask": result.dual_clipped,
        "behave_imp_weight": weights,
        "behave_mask": kept & m,
        "filtered_fraction": 1 - masked_mean(kept, m),
    }


@recipe(
    "verl.compute_value_loss",
    "openrlhf.ValueLoss",
    "areal.ppo_critic_loss_fn",
    "skyrl.ppo_critic_loss",
)
def _(x: Any, p: dict) -> Outputs:
    names = vars(x)
    pick = lambda *options: next(names[o] for o in options if o in names)  # noqa: E731
    m, new = pick("response_mask", "action_mask", "loss_mask"), pick("vpreds", "value", "values")
    old = pick("old_values", "old_value", "values")
    clip = next(
        (p[k] for k in ("cliprange_value", "clip_eps", "value_eps_clip", "value_clip") if k in p),
        None,
    )
    if "value_clip" in p:
        p = p | {"token_level_loss": False}
    loss = lambda v: ppo_value_loss(v, old, pick("returns", "target_value"), clip=clip, mask=m)  # noqa: E731
    result = policy_case(x, p, lambda v: loss(v).per_token, new, m, "gradient")
    clipped = loss(new).clipped
    return {
        "loss": result["loss"],
        "grad_vpreds": result["gradient"],
        "grad_values": result["gradient"],
        "grad_value": result["gradient"],
        "vf_clipfrac": masked_mean(clipped, m),
        "clipfrac": masked_mean(clipped, m),
        "clip_mask": clipped,
    }


@recipe("unirl(own).PPO.compute_loss")
def _(x: Any, p: dict) -> Outputs:
    """Responses of one packed row; a fully masked response still counts as a sequence."""
    ids, sequences = np.repeat(np.arange(len(x.lengths)), x.lengths), len(x.lengths)
    m = x.loss_mask if x.loss_mask.ndim else np.ones(len(ids), bool)
    high = p["clip_range"] if p["clip_range_high"] is None else p["clip_range_high"]

    def reduce(y: Any) -> Any:
        count = sequences if mode(p).startswith("seq-") else None
        horizon = p["horizon"] * sequences  # theirs divides by the sequences in this mode too
        return aggregate(y, m, mode=mode(p), segment_ids=ids, horizon=horizon, denominator=count)

    policy = ppo_policy_loss(
        x.new_logp, x.old_logp, x.token_advantages, clip_low=p["clip_range"], clip_high=high, mask=m
    )
    value = ppo_value_loss(x.new_values, x.old_values, x.returns, clip=p["cliprange_value"], mask=m)
    outside = (policy.ratio > 1 + high) | (policy.ratio < 1 - p["clip_range"])
    return {
        "policy_loss": reduce(policy.per_token),
        "value_loss": reduce(value.per_token),
        "loss": reduce(policy.per_token + p["vf_coef"] * value.per_token),
        "explained_variance": explained_variance(x.new_values, x.returns, m),
        "value_clip_fraction": masked_mean(
            abs(x.new_values - x.old_values) > p["cliprange_value"], m
        ),
        "ratio_mean": masked_mean(policy.ratio, m),
        "clip_fraction": masked_mean(outside, m),
        "approx_kl": masked_mean(kl_estimate(x.new_logp, x.old_logp, kind="k2", mask=m), m),
        "return_mean": masked_mean(x.returns, m),
        "value_mean": masked_mean(x.new_values, m),
        **logprob_change(x, m),
    }
