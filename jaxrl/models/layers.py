"""Parts of a decoder layer: projection, RMS norm, attention, gated MLP.

Parameters are float32 masters and are cast to the compute dtype where they are used. Statistics of
norms, attention scores and softmax are float32 whatever the compute dtype.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float

# Finite, so that a query which sees nothing (padding in a cache) averages instead of making NaN.
_HIDDEN_SCORE = -1e30


class Projection(nn.Module):
    """y = x · kernel (+ bias), contracting the last `contract` axes of x.

    Kernels keep heads apart ([embed, heads, head_dim]), as sharding wants them.
    """

    shape: tuple[int, ...]
    use_bias: bool
    dtype: Any
    contract: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*projected"]:
        """Project x [..., *shape[:contract]] to [..., *shape[contract:]], compute dtype."""
        kernel = self.param("kernel", nn.initializers.normal(0.02), self.shape, jnp.float32)
        axes = tuple(range(x.ndim - self.contract, x.ndim))
        dimensions = ((axes, tuple(range(self.contract))), ((), ()))
        y = lax.dot_general(x.astype(self.dtype), kernel.astype(self.dtype), dimensions)
        if self.use_bias:
            features = self.shape[self.contract :]
            bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
            y = y + bias.astype(self.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


def rms_norm(
    x: Float[Array, "... dim"], scale: Float[Array, " dim"], eps: float
) -> Float[Array, "... dim"]:
    """Root-mean-square norm, scale · x / √(mean(x²) + eps), in x's dtype.

    Statistics are float32. The quotient is rounded to x's dtype before the scale multiplies
    it, as Hugging Face does.

    Args:
        x: activations, any float dtype.
        scale: one number a feature.
        eps: added to the mean square.

    Returns:
        Array like x. A row of zeros stays zeros.

    Reference: Zhang and Sennrich 2019, equation 4.

    >>> rms_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0]), 0.0).tolist()
    [[1.0, -2.0]]
    """
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    scale = scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return wide.astype(x.dtype) * scale


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """Normalise the last axis."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        return rms_norm(x, scale, self.eps)


def attention(
    q: Float[Array, "batch query heads head_dim"],
    k: Float[Array, "batch key kv_heads head_dim"],
    v: Float[Array, "batch key kv_heads head_dim"],
    mask: Bool[Array, "batch query key"],
) -> Float[Array, "batch query heads head_dim"]:
    """Grouped-query attention, softmax(q·kᵀ/√head_dim)·v over the keys that the mask shows.

    Query head h reads key head h // (heads / kv_heads); keys and values are not repeated in memory.

    Args:
        q: queries, already rotated.
        k: keys, already rotated.
        v: values.
        mask: True where a query sees a key. What stands at a hidden key has weight exactly 0, as
            long as it is finite. A query that sees no key gets the mean of the values.

    Returns:
        Attended values in q's dtype; scores and softmax are float32.

    Reference: Vaswani et al. 2017, equation 1; Ainslie et al. 2023 (grouped queries).

    >>> one = jnp.ones((1, 2, 1, 2))
    >>> causal = jnp.array([[[True, False], [True, True]]])
    >>> attention(one, one, jnp.array([[[[2.0, 4.0]], [[4.0, 8.0]]]]), causal)[0, :, 0].tolist()
    [[2.0, 4.0], [3.0, 6.0]]
    """
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * (1 / math.sqrt(head_dim)), _HIDDEN_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(q.shape)
