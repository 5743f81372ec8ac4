"""What the tests of log-probabilities share: problems, a slow float64 reference, gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import vocab_blocks
from jaxrl.logprobs import token_logprobs_and_entropy

FLOATS = ("hidden", "head", "bias", "temperature")


def reference(
    hidden: Any,
    head: Any,
    targets: Any,
    temperature: Any = 1.0,
    bias: Any = 0.0,
    softcap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64, from the definition: p = e^z / Σ e^z, log p[y], −Σ p log p."""
    hidden, head, bias = (np.asarray(x, np.float64) for x in (hidden, head, bias))
    targets = np.asarray(targets)
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), targets.shape)
    logprobs, entropy = np.zeros(targets.shape), np.zeros(targets.shape)
    for at in np.ndindex(targets.shape):
        z = hidden[at] @ head + bias
        if softcap is not None:
            z = softcap * np.tanh(z / softcap)
        z = z / temperature[at]
        z = z - z.max()
        log_total = math.log(sum(math.exp(a) for a in z))
        logprobs[at] = z[targets[at]] - log_total
        entropy[at] = -sum(math.exp(a - log_total) * (a - log_total) for a in z)
    return logprobs, entropy


def problem(*lead: int, width: int = 6, vocab: int = 41, scale: float = 1.0) -> dict[str, Any]:
    """Random hidden, head, targets, per-token temperature and bias."""
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.standard_normal((*lead, width)) * scale, jnp.float32),
        "head": jnp.asarray(rng.standard_normal((width, vocab)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, vocab, lead)),
        "temperature": jnp.asarray(rng.uniform(0.5, 2.0, lead), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal(vocab), jnp.float32),
    }


def evaluate(given: dict[str, Any], **settings: Any) -> tuple[jax.Array, jax.Array]:
    """Compile and call the function with all that is given as arguments."""

    def call(given: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        arguments = {**given, **settings}
        positional = [arguments.pop(name) for name in ("hidden", "head", "targets")]
        return token_logprobs_and_entropy(*positional, **arguments)

    return jax.jit(call)(given)


def outputs_and_gradients(given: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    """Both outputs, and the gradients of a sum in which each output has a weight of its own."""
    rng = np.random.default_rng(9)
    weights = jnp.asarray(rng.standard_normal((2, *given["targets"].shape)), jnp.float32)

    @jax.jit
    def both(given: dict[str, Any]) -> tuple[Any, Any]:
        def scalar(floats: dict[str, Any]) -> tuple[jax.Array, Any]:
            outputs = evaluate({**given, **floats}, **settings)
            return (jnp.stack(outputs) * weights).sum(), outputs

        floats = {name: given[name] for name in FLOATS if name in given}
        slopes, outputs = jax.grad(scalar, has_aux=True)(floats)
        return outputs, slopes

    return both(given)


def gradients(given: dict[str, Any], **settings: Any) -> dict[str, jax.Array]:
    """The second of `outputs_and_gradients`."""
    return outputs_and_gradients(given, **settings)[1]


@functools.cache
def dense_13(softcap: float | None) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """A problem of two rows of 13, and its outputs and gradients in one dense piece."""
    given = problem(2, 13, vocab=75)
    return given, outputs_and_gradients(given, softcap=softcap, chunk_size=None)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Equal leaf by leaf, absolute below 1 and relative above; each leaf of `got` is an array."""
    leaves, tree = jax.tree.flatten(got)
    for a, b in zip(leaves, tree.flatten_up_to(want), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=tolerance, atol=tolerance)


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that a vocabulary of a few dozen takes several, the last one ragged."""
    monkeypatch.setattr(vocab_blocks, "_SIDE_CPU", 32)
    monkeypatch.setattr(vocab_blocks, "_SMALLEST_WIDTH", 4)
