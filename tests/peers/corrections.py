"""Corrections for samples of another policy, with their statistics."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl import importance_weights, kl_estimate, masked_mean, within_bounds
from peers.recipe import Outputs, recipe


@recipe("verl.compute_rollout_correction_weights")
def _(x: Any, p: dict) -> Outputs:
    """Weights may be divided by their mean; the statistics are of the uncapped ratios."""
    m, level, cap = x.response_mask, p["rollout_is"], p["rollout_is_threshold"]
    new, behaviour = x.old_log_prob, x.rollout_log_prob
    weights = importance_weights(new, behaviour, m, level=level, cap=cap)
    metrics = _weight_statistics(new, behaviour, m, level, cap)
    if p["rollout_is_batch_normalize"]:
        by_row = masked_mean(weights, m, axis=-1)
        mean = masked_mean(weights, m) if level == "token" else masked_mean(by_row, m.any(-1))
        weights = weights / mean
        metrics["rollout_is_batch_norm_factor"] = mean
    return {
        "weights": weights,
        "metrics": metrics,
        "offpolicy_metrics": _distance(new, behaviour, m),
    }


def _weight_statistics(new: Any, behaviour: Any, m: Any, level: Any, cap: float) -> Outputs:
    ratios = importance_weights(new, behaviour, m, level=level)
    # Their fractions are over all cells for sequences, over valid ones for tokens.
    counted = m if level == "token" else np.ones_like(m)
    kept = lambda low, high: within_bounds(  # noqa: E731
        new, behaviour, m, low=low, high=high, level=level
    )
    clamped = jnp.clip(ratios, 1 / cap, cap)
    mean, square = masked_mean(clamped, m), masked_mean(clamped**2, m)
    rows = masked_mean(ratios, m, axis=-1)
    return {
        "rollout_is_mean": masked_mean(ratios, m),
        "rollout_is_max": jnp.max(ratios, where=m, initial=0),
        "rollout_is_min": jnp.min(ratios, where=m, initial=jnp.inf),
        "rollout_is_ratio_fraction_high": masked_mean(m & ~kept(0, cap), counted),
        "rollout_is_ratio_fraction_low": masked_mean(m & ~kept(1 / cap, 1e9), counted),
        "rollout_is_std": jnp.sqrt(square - mean**2),
        "rollout_is_eff_sample_size": mean**2 / square,
        "rollout_is_seq_mean": rows.mean(),
        "rollout_is_seq_std": rows.std(ddof=1),
        "rollout_is_seq_max": rows.max(),
        "rollout_is_seq_min": rows.min(),
        "rollout_is_seq_max_deviation": abs(rows - 1).max(),
        "rollout_is_seq_fraction_high": (rows > cap).mean(),
        "rollout_is_seq_fraction_low": (rows < 1 / cap).mean(),
    }


def _distance(new: Any, behaviour: Any, m: Any) -> Outputs:
    """How far the two policies are apart: KL, perplexities by row, chi-squared."""
    k1, k3 = (kl_estimate(behaviour, new, kind=kind, mask=m) for kind in ("k1", "k3"))
    training, rollout = (-masked_mean(x, m, axis=-1) for x in (new, behaviour))
    apart = training - rollout
    squared = lambda level: importance_weights(  # noqa: E731
        2 * new, 2 * behaviour, m, level=level
    )
    return {
        "training_ppl": jnp.exp(training).mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": jnp.exp(rollout).mean(),
        "rollout_log_ppl": rollout.mean(),
        "kl": masked_mean(k1, m),
        "k3_kl": masked_mean(k3, m),
        "log_ppl_diff": apart.mean(),
        "log_ppl_abs_diff": abs(apart).mean(),
        "log_ppl_diff_max": apart.max(),
        "log_ppl_diff_min": apart.min(),
        "ppl_ratio": jnp.exp(apart).mean(),
        "chi2_token": masked_mean(squared("token"), m) - 1,
        "chi2_seq": masked_mean(squared("sequence"), m, axis=-1).mean() - 1,
    }
