"""Log-probabilities: logits are hidden states under an identity head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import token_logprobs_and_entropy
from peers.recipe import Outputs, recipe


def of_logits(logits: Any, labels: Any, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    logits = jnp.asarray(logits, jnp.float32)
    head = np.eye(logits.shape[-1], dtype=np.float32)
    return token_logprobs_and_entropy(logits, head, labels, temperature=temperature, chunk_size=2)


@recipe("verl.logprobs_from_logits_v2", "openrlhf.log_probs_from_logits")
def _(x: Any, p: dict) -> Outputs:
    logprobs, entropy = of_logits(x.logits, x.labels, p.get("temperature", 1.0))
    gradient = jax.grad(lambda z: of_logits(z, x.labels)[0].sum())
    return {
        "logprobs": logprobs,
        "log_probs": logprobs,
        "entropy": entropy,
        "grad_logits_of_sum": gradient(x.logits.astype(np.float32)),
    }


@recipe("trl.selective_log_softmax")
def _(x: Any, p: dict) -> Outputs:
    index = x.index if x.index.ndim == x.logits.ndim else x.index[..., None]
    each = [of_logits(x.logits, index[..., k]) for k in range(index.shape[-1])]
    logprobs = jnp.stack([one for one, _ in each], axis=-1)
    return {"logps": logprobs.reshape(x.index.shape), "entropy": each[0][1]}


@recipe("trl._ChunkedLogProbFunction")
def _(x: Any, p: dict) -> Outputs:
    def f(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token_logprobs_and_entropy(
            hidden,
            weight.T,
            x.targets,
            temperature=p["temperature"],
            softcap=p["final_logit_softcapping"],
            chunk_size=2,
        )

    args = x.last_hidden.astype(np.float32), x.weight.astype(np.float32)
    (logprobs, entropy), pull = jax.vjp(f, *args)
    hidden, weight = pull(
        (x.upstream_grad.astype(np.float32), np.zeros(len(x.targets), np.float32))
    )
    return {"logprobs": logprobs, "entropy": entropy, "grad_hidden": hidden, "grad_weight": weight}


@recipe("xtuner.LogProbContext(eager|chunk)")
def _(x: Any, p: dict) -> Outputs:
    """An ignored label is scored as token 0."""
    hidden, head = (jnp.asarray(y, jnp.float32) for y in (x.hidden_states, x.head_weight.T))
    labels = np.maximum(x.shifted_labels, 0)
    logprobs = token_logprobs_and_entropy(hidden, head, labels, chunk_size=p["chunk_size"])[0]
    return {"eager_logprobs": logprobs, "chunk_logprobs": logprobs}
