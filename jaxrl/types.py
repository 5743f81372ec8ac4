"""The values that travel between the stages, and the one convention they share.

Alignment: every per-token array is aligned to the token it describes,
``logprobs[..., t] = log p(token[t] | token[<t])`` and ``values[..., t] = V(state before token t)``.
The model predicts token ``t`` from the hidden state of the token before it; only `packing.pack`
works out where that is (``policy_before``) and only `steps.predicting_hidden` reads it.

Two spaces appear. *Row space* ``[rows, row_len]`` is what the decoder sees. *Policy space*
``[rows, K]`` holds only the tokens the policy wrote, gathered densely within each row
(``policy_index`` says where each came from). Log-probabilities, values, advantages and losses live
in policy space, so prompt and padding tokens cost no vocabulary product and cannot leak into a
loss.

Leading axes of a packed batch are ``[updates, micros]``: one optimizer step per update, its
gradient summed over its micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

import jax

__all__ = [
    "Anchors",
    "FinishReason",
    "PackedBatch",
    "Prompt",
    "Sampling",
    "TrainBatch",
    "TrainState",
    "Trajectory",
    "pytree",
]

FinishReason = Literal["stop", "length"]
Array = Any
"""A jax.Array inside steps, NumPy on the host, a ShapeDtypeStruct where only shapes are known."""
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that JAX treats as a tree of its fields."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the prompt set, tokenised once."""

    row: int
    """Index of the row in its source; identical texts in different rows stay different prompts."""
    ids: tuple[int, ...]
    """Token ids the engine continues, generation header included."""
    text: str
    """The prompt as text, for reward functions and samples."""
    epoch: int = 0
    """Pass over the prompt set in which it was taken; with the row it makes a request's seed."""
    columns: Mapping[str, Any]
    """Every other column of the row, handed to the reward functions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """What is asked of an engine, and part of what a log-probability means."""

    max_new_tokens: int
    """Longest response, in tokens; the stop token counts."""
    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy, with log-probabilities at temperature 1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these, which belongs to the response."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished response: token ids in and out, text is never tokenised again."""

    prompt: Prompt
    sample: int
    """Which of the prompt's samples this is."""
    response_ids: tuple[int, ...]
    """Never empty. Ends with the stop token exactly when finish_reason is "stop"."""
    logprobs: tuple[float, ...]
    """Log-probability with which each response token was drawn, temperature and filters included,
    in nats (SGLang's know nothing of filters, so training refuses those with it)."""
    finish_reason: FinishReason
    """From the engine alone: "stop" or "length"; never guessed from widths or token ids."""
    weight_version: int = 0
    """Version of the weights that sampled its first token, the oldest."""
    token_versions: tuple[int, ...] = ()
    """Version for each response token, where it changed under way; empty means all the same."""
    loss_mask: tuple[bool, ...] = ()
    """Which response tokens are the policy's own; empty means all of them."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt.ids + self.response_ids

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which response tokens are the policy's own, written out."""
        return self.loss_mask or (True,) * len(self.response_ids)

    @property
    def truncated(self) -> bool:
        """Whether the length limit, not the policy, ended the response."""
        return self.finish_reason == "length"


@pytree
class PackedBatch:
    """Trajectories laid out in rows; leading axes [updates, micros, rows] (or a slice of them).

    Padding has segment 0. Where `policy_valid` is False the other policy-space fields hold zeros.
    """

    tokens: Array
    """int32 [..., row_len]."""
    positions: Array
    """int32 [..., row_len]; counts from 0 within each segment."""
    segment_ids: Array
    """int32 [..., row_len]; 1, 2, ... for the units of a row, 0 for padding.

    A unit is a prompt followed by its response, or by several responses to it."""
    branch_ids: Array
    """int32 [..., row_len]; 0 in the prompt, 1, 2, ... in the responses of a unit.

    A token sees its unit's prompt and what precedes it in its own branch."""
    policy_index: Array
    """int32 [..., K]; position in the row of each policy token."""
    policy_before: Array
    """int32 [..., K]; position of the token before it: where it is predicted."""
    policy_valid: Array
    """bool [..., K]."""
    policy_segments: Array
    """int32 [..., K]; number of its trajectory within the row, 0 where there is none."""
    policy_targets: Array
    """int32 [..., K]; the policy tokens themselves."""
    trajectory: Array
    """int32 [..., K]; index of the trajectory in the rollout batch."""
    behaviour_logprobs: Array
    """float32 [..., K], nats."""


@pytree
class Anchors:
    """What is frozen before the first optimizer step, policy space [updates, micros, rows, K]."""

    old_logprobs: Array
    old_values: Array
    ref_logprobs: Array
    """Equal to old_logprobs when no reference is used."""
    entropies: Array


@pytree
class TrainBatch:
    """A packed batch with everything the losses need; same leading axes."""

    packed: PackedBatch
    old_logprobs: Array
    old_values: Array
    ref_logprobs: Array
    advantages: Array
    returns: Array


@pytree
class TrainState:
    """All that an optimizer step reads and writes; with the cursor, all that a checkpoint holds."""

    policy_params: Any
    value_params: Any
    policy_opt: Any
    value_opt: Any
    updates: Array
    """int32 scalar: optimizer steps taken, skipped ones included."""
    iteration: Array
    """int32 scalar: finished iterations."""
    kl_coef: Array
    """float32 scalar: the (possibly adaptive) coefficient of the KL penalty."""
    skipped: Array
    """int32 scalar: updates skipped for a non-finite loss or gradient."""
    skipped_in_a_row: Array
    """int32 scalar."""
