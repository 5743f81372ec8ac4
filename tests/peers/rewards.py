"""KL, token rewards, endings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import adaptive_kl_coef, ending_scores, kl_estimate, token_rewards
from peers.recipe import Outputs, recipe

KINDS = {"mse": "k2", "low_var_kl": "k3"}


@recipe(
    "verl.kl_penalty",
    "openrlhf.compute_approx_kl",
    "slime.compute_approx_kl",
    "nemo.calculate_kl",
    "xtuner.kl_penalty",
)
def _(x: Any, p: dict) -> Outputs:
    """Some clamp the result as well, most to ±10."""
    names = list(vars(x))
    new, ref = vars(x)[names[0]], vars(x)[names[1]]
    named = next(p[k] for k in ("kl_penalty", "kl_estimator", "kl_loss_type", "kl_type") if k in p)
    clamped = "kl_estimator" in p or named == "low_var_kl"
    bound = p.get("output_clamp_value") or (10.0 if clamped else np.inf)

    def estimate(new: Any) -> jax.Array:
        return jnp.clip(kl_estimate(new, ref, kind=KINDS.get(named, named)), -bound, bound)

    if "loss_weights" in names:
        return {"loss": (estimate(new) * x.loss_weights).sum()}
    gradient = jax.grad(lambda y: estimate(y).sum())(new.astype(np.float32))
    return {"kl": estimate(new), "grad_logprob_of_sum": gradient}


@recipe("verl.compute_rewards")
def _(x: Any, p: dict) -> Outputs:
    kl = kl_estimate(x.old_log_prob, x.ref_log_prob)
    penalty = token_rewards(
        np.zeros(len(kl)), np.ones(kl.shape, bool), kl=kl, kl_coef=p["kl_ratio"]
    )
    return {"rewards": x.token_level_scores + penalty}


@recipe("openrlhf.compute_reward")
def _(x: Any, p: dict) -> Outputs:
    """The penalty is paid at every position, the score sits on the last valid one."""
    scores = x.r if p["reward_clip_range"] is None else np.clip(x.r, *p["reward_clip_range"])
    everywhere = np.ones_like(x.action_mask)
    rewards = token_rewards(
        scores, everywhere, kl=x.kl, kl_coef=p["kl_coef"], score_mask=x.action_mask
    )
    return {"token_rewards": rewards}


@recipe("verl.AdaptiveKLController")
def _(x: Any, p: dict) -> Outputs:
    coef, history = p["init_kl_coef"], []
    for observed, n in x.current_kl_and_n_steps:
        coef = adaptive_kl_coef(coef, observed, target=p["target_kl"], horizon=p["horizon"], n=n)
        history.append(coef)
    return {"values_after_each": history}


@recipe("unirl(own).truncated_reward")
def _(x: Any, p: dict) -> Outputs:
    """Truncated is what has the length of the limit; here the engine says it."""
    limit = p["max_new_tokens"]
    scores = ending_scores(
        x.rewards,
        x.response_lengths >= limit,
        x.response_lengths,
        mode=p["truncated_reward"],
        max_length=limit,
        buffer=p["overlong_buffer_len"],
        penalty=p["overlong_penalty_factor"],
    )
    return {"rewards": scores}
