"""The first pure step: score.  `advantage_step` and `update` have the other two.

Each ``make_*_step`` returns a function of arrays to be jitted by the caller. The model comes in as
a `Forward`, so a decoder written elsewhere can be trained. Micro-batches are walked by a loop whose
length is the number of non-empty ones: the empty tail of a plan costs nothing, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.logprobs import PlacedHead, TiedHead, token_logprobs_and_entropy
from jaxrl.types import Anchors, PackedBatch

__all__ = [
    "Forward",
    "make_score_step",
    "policy_outputs",
    "predicting_hidden",
    "row_inputs",
    "state_values",
    "busy_micros",
    "take_micro",
]

Params = Any


class HiddenApply(Protocol):
    """The decoder up to its final norm."""

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        branch_ids: jax.Array,
        /,
    ) -> jax.Array:
        """Hidden states [rows, row_len, D]; the other arguments are [rows, row_len].

        A token sees the tokens before it in its segment whose branch is 0 or its own.
        """
        ...


class Forward(NamedTuple):
    """What the steps need of a model."""

    hidden: HiddenApply
    head: Callable[[Params], jax.Array | TiedHead | PlacedHead]
    """Policy parameters to the output matrix [D, V], and how it is used."""
    values: Callable[[Params, Any, PackedBatch], jax.Array] | None
    """(value_params, policy hidden [rows, row_len, D], packed rows) to values [rows, K], float32.

    None: no critic; values are zero and value_params an empty tree.
    """
    separate: bool = False
    """Whether `values` leaves the policy's hidden states alone (and may be given None for them)."""


def row_inputs(packed: PackedBatch) -> tuple[Any, Any, Any, Any]:
    """What a decoder is given of packed rows, in `HiddenApply`'s order."""
    return packed.tokens, packed.positions, packed.segment_ids, packed.branch_ids


def predicting_hidden(hidden: jax.Array, packed: PackedBatch) -> jax.Array:
    """Hidden states that predict the policy tokens: [rows, row_len, D] to [rows, K, D].

    The state before a policy token stands where that token is predicted: at the token before it in
    its trajectory. Entries without a policy token read position 0 and are masked by every user.
    """
    return jnp.take_along_axis(hidden, packed.policy_before[..., None], axis=-2)


def policy_outputs(
    forward: Forward,
    policy_params: Params,
    value_params: Params,
    packed: PackedBatch,
    *,
    chunk_size: int | None,
    temperature: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities, entropies and values [rows, K] of one micro-batch.

    The first two at policy tokens, values at every slot that belongs to a trajectory; 0 elsewhere.

    Anchors and training both come through here, which is what makes the first ratio exactly 1.
    """
    hidden = forward.hidden(policy_params, *row_inputs(packed))
    logprobs, entropies = token_logprobs_and_entropy(
        predicting_hidden(hidden, packed),
        forward.head(policy_params),
        packed.policy_targets,
        chunk_size=chunk_size,
        temperature=temperature,
        mask=packed.policy_valid,
    )
    return logprobs, entropies, state_values(forward, value_params, hidden, packed)


def state_values(
    forward: Forward, value_params: Params, hidden: jax.Array | None, packed: PackedBatch
) -> jax.Array:
    """Values [rows, K], 0 at slots of no trajectory, and everywhere without a critic."""
    slots = packed.policy_segments > 0
    if forward.values is None:
        return jnp.zeros(slots.shape, jnp.float32)
    return jnp.where(slots, forward.values(value_params, hidden, packed), 0.0)


def busy_micros(valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The micro-batches that hold a policy token: their indices, first, and how many there are.

    valid [micros, rows, K]. Loops of that length never compute the empty ones.
    """
    busy = jnp.any(valid, axis=tuple(range(1, valid.ndim)))
    return jnp.argsort(~busy, stable=True), jnp.sum(busy)


def take_micro(tree: Any, index: jax.Array) -> Any:
    """Slice `index` of the leading axis of every leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def make_score_step(
    forward: Forward, *, chunk_size: int | None, temperature: float, with_reference: bool
) -> Callable[..., Anchors]:
    """Build ``score_step(policy_params, value_params, ref_params, packed) -> Anchors``.

    Fills old log-probabilities, old values, reference log-probabilities and entropies over the very
    micro-batches the update will train on. Without a reference, pass None: the reference
    log-probabilities then equal the old ones and every KL is 0.
    """

    def score_step(
        policy_params: Params, value_params: Params, ref_params: Params, packed: PackedBatch
    ) -> Anchors:
        lead = packed.policy_valid.shape[:2]
        flat = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), packed)
        options: dict[str, Any] = {"chunk_size": chunk_size, "temperature": temperature}

        def one(micro: PackedBatch) -> Anchors:
            logprobs, entropies, values = policy_outputs(
                forward, policy_params, value_params, micro, **options
            )
            ref = logprobs
            if with_reference:
                no_critic = forward._replace(values=None)
                ref, _, _ = policy_outputs(no_critic, ref_params, {}, micro, **options)
            return Anchors(
                old_logprobs=logprobs, old_values=values, ref_logprobs=ref, entropies=entropies
            )

        order, count = busy_micros(flat.policy_valid)

        def body(i: jax.Array, out: Anchors) -> Anchors:
            new = one(take_micro(flat, order[i]))
            return jax.tree.map(
                lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, order[i], 0), out, new
            )

        anchors = lax.fori_loop(0, count, body, _zero_anchors(flat.policy_valid))
        return jax.tree.map(lambda x: jnp.reshape(x, (*lead, *x.shape[1:])), anchors)

    return score_step


def _zero_anchors(valid: jax.Array) -> Anchors:
    zero = jnp.zeros(valid.shape, jnp.float32)
    return Anchors(old_logprobs=zero, old_values=zero, ref_logprobs=zero, entropies=zero)
