"""Raw scores normalised, scaled, shifted and clipped into those that are trained on; host code."""

from __future__ import annotations

import numpy as np

from jaxrl.config import RewardConfig
from jaxrl.errors import RewardError

__all__ = ["merge_moments", "shape_scores"]


def shape_scores(
    values: np.ndarray, valid: np.ndarray, reward: RewardConfig, moments: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shaped scores of one batch, and the running moments with the batch counted in.

    With m and d the mean and deviation of all valid scores of the run so far, this batch's too,

        z = x                  normalise off
        z = x / d              normalise std
        z = (x - m) / d        normalise mean_std
        y = clamp(scale * z + shift, -clip, clip)

    where d = sqrt(M2 / count), the population's. A deviation of zero, that is one below what
    float32 can tell from rounding of the mean, divides nothing. The arithmetic is float64.

    Args:
        values: float [N], finite where valid.
        valid: bool [N]; the others are not counted and come out as 0.
        reward: `normalise`, `scale`, `shift` and `clip` of it are read.
        moments: float [3]: count, mean, M2 (sum of squared distances from the mean) before.

    Returns:
        float32 [N], reward units; float32 [3], which are `moments` if nothing is normalised.

    Raises:
        RewardError: A result is beyond float32.

    References:
        Welford 1962 and Chan, Golub, LeVeque 1979 for the moments; Engstrom et al. 2020,
        https://arxiv.org/abs/2005.12729, for rewards divided by a running deviation.
    """
    counted = np.asarray(values, np.float64)[valid]
    shaped, merged = counted, np.asarray(moments)
    if reward.normalise != "off":
        merged = merge_moments(merged, counted)
        count, mean, squares = merged
        deviation = np.sqrt(squares / max(count, 1.0))
        if reward.normalise == "mean_std":
            shaped = shaped - mean
        if deviation > np.finfo(np.float32).eps * abs(mean):
            shaped = shaped / deviation
    shaped = reward.scale * shaped + reward.shift
    if reward.clip is not None:
        shaped = np.clip(shaped, -reward.clip, reward.clip)
    result = np.zeros(len(values), np.float32)
    with np.errstate(over="ignore"):
        result[valid], new_moments = shaped, merged.astype(np.float32)
    if not (np.isfinite(result).all() and np.isfinite(new_moments).all()):
        largest = np.abs(counted).max(initial=0.0)
        raise RewardError(
            f"scores up to {largest:g} with reward.normalise={reward.normalise}, "
            f"reward.scale={reward.scale:g} and reward.shift={reward.shift:g} do not fit float32; "
            "return smaller rewards"
        )
    return result, new_moments


def merge_moments(moments: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Count, mean and M2 of the values behind `moments` and of `values` together, float64 [3].

    With n, m, s those of before and k, u, t those of the new values (Chan et al.):

        n + k,  m + (u - m) k / (n + k),  s + t + (u - m)^2 n k / (n + k)
    """
    count, mean, squares = np.asarray(moments, np.float64)
    added = len(values)
    if not added:
        return np.array([count, mean, squares])
    values = np.asarray(values, np.float64)
    gap = values.mean() - mean
    total = count + added
    return np.array(
        [
            total,
            mean + gap * added / total,
            squares + np.square(values - values.mean()).sum() + gap**2 * count * added / total,
        ]
    )
