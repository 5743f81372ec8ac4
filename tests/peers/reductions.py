"""Means, whitening, aggregation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl import aggregate, masked_mean, whiten
from peers.recipe import At, Outputs, mode, recipe


@recipe("verl.masked_whiten", "trl.masked_whiten")
def _(x: Any, p: dict) -> Outputs:
    m = x.mask
    mean = masked_mean(x.values, m)
    square = masked_mean((x.values - mean) ** 2, m)
    n = m.sum()
    return {
        "whitened": At(whiten(x.values, m, shift_mean=p["shift_mean"], ddof=1), m),
        "mean": mean,
        "var_biased": square,
        "var_unbiased": square * n / (n - 1),
    }


@recipe("verl.masked_mean")
def _(x: Any, p: dict) -> Outputs:
    mean = masked_mean(x.values, x.mask)
    return {
        "mean": mean,
        "mean_axis_m1": masked_mean(x.values, x.mask, axis=-1),
        "sum": mean * x.mask.sum(),
    }


@recipe("openrlhf.masked_normalize")
def _(x: Any, p: dict) -> Outputs:
    """One axis at a time."""
    return {"out": jax.vmap(whiten, 1 - p["dim"], 1 - p["dim"])(x.tensor, x.mask)}


@recipe("areal.masked_normalization")
def _(x: Any, p: dict) -> Outputs:
    """Divides by std + eps, not by √(var + eps)."""
    std = np.std(x.x[x.mask], ddof=int(p["unbiased"]))
    white = whiten(x.x, x.mask, ddof=int(p["unbiased"]), eps=0.0)
    return {"out": At(white * std / (std + p["eps"]), x.mask)}


@recipe("verl.agg_loss", "openrlhf.aggregate_loss")
def _(x: Any, p: dict) -> Outputs:
    """Ranks are averaged afterwards, so each scales its part of the sum by their number."""
    loss, m = (x.loss_mat if hasattr(x, "loss_mat") else x.loss), x.loss_mask
    count = p.get("global_batch_size", p.get("batch_num_tokens"))
    part = aggregate(loss, m, mode=mode(p), horizon=m.shape[1], denominator=count)
    return {"loss": part * p.get("dp_size", 1)}
