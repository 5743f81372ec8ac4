"""Parts of a decoder layer: projection and RMS norm.

Parameters are float32 masters and are cast to the compute dtype where they are used, and
where a mesh splits them over fsdp, gathered there. Statistics of norms are float32 whatever the
compute dtype.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl.sharding import constrain


class Projection(nn.Module):
    """y = x · kernel (+ bias), contracting the last `contract` axes of x.

    Kernels keep heads apart ([embed, heads, head_dim]), as sharding wants them. On a mesh the
    kernel is cast before it is gathered over fsdp, and the output is split as its axes say.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension of the kernel."""
    use_bias: bool
    dtype: Any
    mesh: Mesh | None
    contract: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*projected"]:
        """Project x [..., *shape[:contract]] to [..., *shape[contract:]], compute dtype."""
        kernel = self.param("kernel", nn.initializers.normal(0.02), self.shape, jnp.float32)
        kernel = constrain(self.mesh, kernel.astype(self.dtype), self.axes)
        features, lead = self.shape[self.contract :], x.shape[: x.ndim - self.contract]
        # As one matrix product: the gradient of a product over several axes copies the activations
        # with their axes turned, which on a CPU takes longer than the product.
        inner = math.prod(self.shape[: self.contract])
        y = lax.dot(x.astype(self.dtype).reshape(-1, inner), kernel.reshape(inner, -1))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
            y = y + bias.astype(self.dtype).reshape(1, -1)
        y = y.reshape(*lead, *features)
        return constrain(self.mesh, y, ("batch", "time", *self.axes[self.contract :]))


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
