"""Tokamax: the head and its gradients, in blocks over tokens and vocabulary."""
# pyright: reportMissingImports=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import peer_command
import tokamax
from bench_inputs import Sizes, head_arrays
from bench_timing import Work


def head(sizes: Sizes, *, gradient: bool) -> Work:
    """-mean log p; no entropy, no temperature.

    Its vocabulary blocks have to divide the vocabulary: elsewhere the padding is counted.
    """
    hidden, head, targets = head_arrays(sizes)

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        return tokamax.linear_softmax_cross_entropy_loss(
            hidden, targets, head, reduction="mean", implementation="chunked_xla"
        )

    function = jax.value_and_grad(loss, (0, 1)) if gradient else loss
    arguments = (hidden.reshape(-1, sizes.hidden), head, targets.reshape(-1))
    arguments = tuple(map(jnp.asarray, arguments))
    program = jax.jit(function).lower(*arguments).compile()
    return Work(
        lambda: program(*arguments),
        peer_command.temporaries(program),
        lambda out: {"mean": -float(out[0] if gradient else out)},
        targets.size,
    )


if __name__ == "__main__":
    peer_command.main(
        {
            "head_forward": partial(head, gradient=False),
            "head_gradient": partial(head, gradient=True),
        },
        ("tokamax", "jax", "jaxlib", "numpy"),
        jax.block_until_ready,
    )
