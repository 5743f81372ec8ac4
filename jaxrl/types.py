"""The values that travel between the stages, and the one convention they share.

Alignment: every per-token array is aligned to the token it describes,
``logprobs[..., t] = log p(token[t] | token[<t])`` and ``values[..., t] = V(state before token t)``.
The model predicts token ``t`` from the hidden state of the token before it; only `packing.pack`
works out where that is (``policy_before``) and only `steps.predicting_hidden` reads it.

Two spaces appear. *Row space* ``[rows, row_len]`` is what the decoder sees. *Policy space*
``[rows, K]`` holds the tokens the policy wrote, gathered densely within each row (``policy_index``
says where each came from). Log-probabilities, values, advantages and losses live in policy space,
so prompt and padding tokens cost no vocabulary product and cannot leak into a loss. Some runs need
a value elsewhere too; their policy space has slots that are no policy tokens: the other tokens of
the response where these are steps (`gae_over` "response"), and one behind each trajectory for the
state after its last token (`truncated` "bootstrap").

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
    "Outcomes",
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
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat the ids were made from, for an environment or reward model; empty without chat."""
    epoch: int = 0
    """Pass over the prompt set in which it was taken; with the row it makes a request's seed."""
    first_sample: int = 0
    """Number of its first sample: an episode that goes on keeps its own, and so its own seeds."""
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
    """Never empty. Ends with the stop token when finish_reason is "stop"; and then only, but for
    an episode that was over its limit of turns or tokens after a finished turn."""
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
    rewards: tuple[float, ...] = ()
    """Reward at each response token that the environment or a reward function gave, beside the
    score; empty means none."""

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

    Padding has segment 0, in rows and in policy space, and zeros in every other field.
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
    """int32 [..., K]; position in the row of each slot's token."""
    policy_before: Array
    """int32 [..., K]; position of the token before it: where it is predicted and valued."""
    policy_valid: Array
    """bool [..., K]; the policy's own tokens, which alone are trained."""
    policy_steps: Array
    """bool [..., K]; the steps of GAE: the policy's own tokens, or all of the response. A slot that
    is no step but has a segment stands for the state after its trajectory's last token."""
    policy_segments: Array
    """int32 [..., K]; number of its trajectory within the row, 0 where there is none."""
    policy_targets: Array
    """int32 [..., K]; the tokens themselves."""
    trajectory: Array
    """int32 [..., K]; index of the trajectory in the rollout batch."""
    behaviour_logprobs: Array
    """float32 [..., K], nats; 0 at slots that are no policy tokens."""
    rewards: Array
    """float32 [..., K]; rewards beside the score, each at the step it belongs to."""


@pytree
class Outcomes:
    """What became of each trajectory of the rollout batch, [trajectories]."""

    scores: Array
    """float32; what its last step is rewarded with."""
    groups: Array
    """int32; the number of its prompt in the batch."""
    truncated: Array
    """bool; the length limit ended it."""
    positive: Array
    """bool; good enough to be imitated (`algorithm.nll_above`)."""


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
    weights: Array
    """float32; factor on the policy loss of each policy token: 1, or what corrects for sampling
    with another policy; 0 where that one is too far off."""
    positive: Array
    """bool; policy tokens of good responses."""


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
    reward_moments: Array
    """float32 [3]: count, mean and sum of squared deviations of all scores so far."""
    skipped: Array
    """int32 scalar: updates skipped for a non-finite loss or gradient."""
    skipped_in_a_row: Array
    """int32 scalar."""
