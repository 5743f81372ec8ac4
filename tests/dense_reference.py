"""The advantage step and the whole objective once more: trajectory by trajectory, plain loops.

Nothing here is packed, masked or scanned, and no function of `jaxrl` is called; only the settings
and the trajectories are shared with what it checks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stepping import VOCAB, hidden_apply

from jaxrl.config import AlgorithmConfig
from jaxrl.types import Outcomes, Trajectory

TEMPERATURE = 0.7


def outputs(policy: Any, value: Any, t: Trajectory) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [R, V] and values [R] of a response's R tokens, and the value behind it."""
    ids, start = jnp.asarray(t.ids), len(t.prompt.ids) - 1
    ones = jnp.ones_like(ids)
    hidden = hidden_apply(policy, ids, jnp.arange(len(ids)), ones, ones)[start:]
    values = (hidden @ value["w"])[:, 0]
    return jax.nn.log_softmax(hidden[:-1] @ policy["head"] / TEMPERATURE), values[:-1], values[-1]


def chosen(logprobs: jax.Array, t: Trajectory) -> jax.Array:
    return jnp.sum(logprobs * jax.nn.one_hot(jnp.asarray(t.response_ids), VOCAB), -1)


def estimate(kind: str, d: Any, xp: Any) -> Any:
    return {"k1": d, "k2": d * d / 2, "k3": xp.exp(-d) - 1 + d, "abs": abs(d)}[kind]


def token_rewards(
    algorithm: AlgorithmConfig, t: Trajectory, steps: list[int], score: float, kl: np.ndarray
) -> np.ndarray:
    """[R]; a reward at a token that is no step goes to the step before, or else to the first."""
    rewards = np.zeros(len(t.response_ids))
    for at, reward in enumerate(t.rewards):
        before = [s for s in steps if s <= at]
        rewards[before[-1] if before else steps[0]] += reward
    if algorithm.kl_in == "reward":
        rewards -= algorithm.kl_coef * kl * np.array(t.mask)
    rewards[steps[-1]] += score
    return rewards


def recursion(
    rewards: np.ndarray, values: np.ndarray, end: float, steps: list[int], gamma: float, lam: float
) -> np.ndarray:
    advantages, running, following = np.zeros(len(rewards)), 0.0, end
    for s in reversed(steps):
        running = rewards[s] + gamma * following - values[s] + gamma * lam * running
        advantages[s], following = running, values[s]
    return advantages


def advantages_and_returns(
    algorithm: AlgorithmConfig, ts: list[Trajectory], outcomes: Outcomes, old: Any, ref: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """[R] for each trajectory; read at its own tokens only."""
    advantages, returns, totals = [], [], []
    for i, t in enumerate(ts):
        own = np.flatnonzero(t.mask).tolist()
        steps = own if algorithm.gae_over == "policy_tokens" else list(range(len(t.mask)))
        logp, values, end = (np.asarray(x, np.float64) for x in old[i])
        kl = estimate(algorithm.kl_kind, logp - np.asarray(ref[i], np.float64), np)
        rewards = token_rewards(algorithm, t, steps, float(outcomes.scores[i]), kl)
        totals.append(rewards.sum())
        last = float(end) if algorithm.truncated == "bootstrap" and t.truncated else 0.0
        lam = value_lam = algorithm.lam
        if algorithm.lam_alpha is not None:
            lam = max(0.0, 1 - 1 / (algorithm.lam_alpha * len(steps)))
        if algorithm.value_lam is not None:
            value_lam = algorithm.value_lam
        if algorithm.advantage_mode == "returns":
            values, lam, last = np.zeros(len(values)), 1.0, 0.0
        given = (rewards, values, last, steps, algorithm.gamma)
        advantages.append(recursion(*given, lam))
        returns.append(recursion(*given, value_lam) + values)
    if algorithm.advantage_mode == "grpo":
        advantages = [
            np.full(len(t.mask), a) for t, a in zip(ts, relative(algorithm, totals), strict=True)
        ]
    return whitened(algorithm, ts, advantages), returns


def relative(algorithm: AlgorithmConfig, totals: list[float]) -> list[float]:
    """Groups are pairs."""
    out = []
    for a, b in zip(totals[::2], totals[1::2], strict=True):
        half = (a - b) / 2
        by = {"none": 1.0, "loo": 0.5, "std": abs(half) + 1e-6}[algorithm.group_scale]
        out += [half / by, -half / by]
    return out


def whitened(
    algorithm: AlgorithmConfig, ts: list[Trajectory], advantages: list[np.ndarray]
) -> list[np.ndarray]:
    if algorithm.whitening == "off":
        return advantages
    parts = [range(len(ts))]
    if algorithm.whitening == "group":
        parts = [range(i, i + 2) for i in range(0, len(ts), 2)]
    out = list(advantages)
    for part in parts:
        cells = np.concatenate([advantages[i][np.array(ts[i].mask)] for i in part])
        for i in part:
            out[i] = (advantages[i] - cells.mean()) / np.sqrt(cells.var() + 1e-8)
    return out


def correction(algorithm: AlgorithmConfig, t: Trajectory, logp: np.ndarray) -> np.ndarray:
    """[R]: the factor on the policy loss of each token."""
    own = np.array(t.mask)
    d = np.where(own, logp - np.array(t.logprobs), 0.0)
    levels = {
        "token": d,
        "sequence": np.full(len(d), d.sum()),
        "geometric": np.full(len(d), d.sum() / own.sum()),
    }
    weights = np.ones(len(d))
    if algorithm.importance != "off":
        weights = np.minimum(np.exp(levels[algorithm.importance]), algorithm.importance_cap)
    if algorithm.rejection != "off":
        ratio = np.exp(levels[algorithm.rejection])
        weights[(ratio < algorithm.rejection_low) | (ratio > algorithm.rejection_high)] = 0.0
    return weights


def anchors(ts: list[Trajectory], old_params: tuple[Any, Any], ref_policy: Any) -> tuple[Any, Any]:
    """Of each trajectory (log-probabilities, values, value behind it), and the reference's."""
    old, ref = [], []
    for t in ts:
        logprobs, values, end = outputs(*old_params, t)
        old.append((chosen(logprobs, t), values, end))
        ref.append(chosen(outputs(ref_policy, old_params[1], t)[0], t))
    return old, ref


def objective(
    algorithm: AlgorithmConfig,
    ts: list[Trajectory],
    outcomes: Outcomes,
    params: tuple[Any, Any],
    old_params: tuple[Any, Any],
    ref_policy: Any,
    horizon: int,
) -> jax.Array:
    """The loss of one update over all of `ts`, at `params`, with anchors made at `old_params`."""
    old, ref = anchors(ts, old_params, ref_policy)
    advantages, returns = advantages_and_returns(algorithm, ts, outcomes, old, ref)
    terms, nll, good = [], 0.0, 0
    for i, t in enumerate(ts):
        own = np.flatnonzero(t.mask)
        anchor = np.asarray(old[i][0]) if algorithm.old_logprobs == "trainer" else t.logprobs
        logprobs, values, _ = outputs(*params, t)
        logp, now = chosen(logprobs, t)[own], values[own]
        before, old_values = np.asarray(anchor)[own], np.asarray(old[i][1])[own]
        d = logp - before
        ratio = jnp.exp(jnp.full(len(own), d.mean()) if algorithm.ratio_level == "sequence" else d)
        a = advantages[i][own]
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
        loss = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, low, high))
        if algorithm.dual_clip is not None:
            loss = jnp.where(a < 0, jnp.minimum(loss, -a * algorithm.dual_clip), loss)
        loss *= correction(algorithm, t, np.asarray(old[i][0]))[own]
        if algorithm.advantage_mode == "gae":
            target = returns[i][own]
            error = (now - target) ** 2
            if algorithm.value_clip is not None:
                reach = algorithm.value_clip
                near = old_values + jnp.clip(now - old_values, -reach, reach)
                error = jnp.maximum(error, (near - target) ** 2)
            loss += algorithm.value_coef * error / 2
        loss += algorithm.entropy_coef * jnp.sum(jnp.exp(logprobs) * logprobs, -1)[own]
        if algorithm.kl_in == "loss":
            kl = estimate(algorithm.kl_kind, logp - np.asarray(ref[i])[own], jnp)
            loss += algorithm.kl_coef * kl * (jnp.exp(d) if algorithm.kl_weighted else 1.0)
        terms.append(loss)
        if bool(outcomes.positive[i]):
            nll, good = nll - jnp.sum(logp), good + len(own)
    total = {
        "token-mean": lambda: sum(x.sum() for x in terms) / sum(len(x) for x in terms),
        "seq-mean-token-mean": lambda: sum(x.mean() for x in terms) / len(terms),
        "seq-mean-token-sum": lambda: sum(x.sum() for x in terms) / len(terms),
        "seq-mean-token-sum-norm": lambda: sum(x.sum() for x in terms) / horizon,
    }[algorithm.aggregation]()
    return total + algorithm.nll_coef * nll / max(good, 1)
