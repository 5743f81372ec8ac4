"""Plan and pack: which trajectory sits in which update, micro-batch, row and offset.

The plan is made once an iteration and used for the anchors and for the training forward alike, so
both see the same rows and shapes. It is host-side, numpy only, and a pure function of the lengths:
the same rollout batch is laid out the same way after a resume.

Shapes come from few buckets, so that the number of compilations stays bounded: row lengths from the
config, the policy-token count of a row rounded up to an eighth of the row, micro-batches to a power
of two (empty ones are at the end and are never computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.errors import ConfigError, DataError
from jaxrl.types import PackedBatch, Trajectory

__all__ = ["Plan", "Slot", "pack", "plan"]

_POLICY_BUCKETS_PER_ROW = 8


@dataclass(frozen=True)
class Slot:
    """Where one trajectory lies."""

    trajectory: int
    update: int
    micro: int
    row: int
    offset: int
    segment: int


@dataclass(frozen=True)
class Plan:
    """The layout of a rollout batch."""

    slots: tuple[Slot, ...]
    updates: int
    micros: int
    rows: int
    row_length: int
    policy_length: int
    used_micros: int
    """Micro-batches that hold anything, over all updates."""
    used_tokens: int

    @property
    def efficiency(self) -> float:
        """Tokens used over tokens computed; empty micro-batches are not computed."""
        computed = self.used_micros * self.rows * self.row_length
        return self.used_tokens / computed if computed else 0.0


def plan(
    lengths: Sequence[int],
    policy_lengths: Sequence[int],
    *,
    updates: int,
    micro_batch_tokens: int,
    row_lengths: Sequence[int],
    row_multiple: int = 1,
) -> Plan:
    """Lay trajectories of `lengths` tokens out in rows.

    Trajectories are split over the updates in order, in parts that differ by at most one, so that
    the samples of a prompt stay together. Within an update the longest come first, each into the
    first row with room (first-fit decreasing), and rows fill micro-batches in order.

    Args:
        lengths: Tokens of each trajectory, prompt included.
        policy_lengths: Of those, tokens the policy wrote and is trained on.
        updates: Optimizer steps the batch is split into.
        micro_batch_tokens: Most tokens a micro-batch computes: rows times row length.
        row_lengths: Allowed row lengths.
        row_multiple: Rows of a micro-batch are a multiple of this (the mesh's batch axes).

    Raises:
        ConfigError: When no allowed row holds the longest trajectory, or the budget holds no row.
    """
    row_length = _row_length(max(lengths, default=1), row_lengths)
    rows = micro_batch_tokens // row_length // row_multiple * row_multiple
    if rows < 1:
        raise ConfigError(
            f"packing.micro_batch_tokens={micro_batch_tokens} holds no {row_multiple} row(s) of "
            f"{row_length} tokens; raise it to at least {row_multiple * row_length}"
        )
    placed: list[tuple[int, int, int, int, int]] = []  # trajectory, update, bin, offset, segment
    bins_of_update, fullest = [], 1
    for update, part in enumerate(np.array_split(np.arange(len(lengths)), updates)):
        bins = _first_fit_decreasing([(int(i), lengths[i]) for i in part], row_length)
        bins_of_update.append(len(bins))
        for number, content in enumerate(bins):
            fullest = max(fullest, sum(policy_lengths[i] for i, _ in content))
            for segment, (i, offset) in enumerate(content, start=1):
                placed.append((i, update, number, offset, segment))
    used = [-(-count // rows) for count in bins_of_update]
    step = max(row_length // _POLICY_BUCKETS_PER_ROW, 1)
    return Plan(
        slots=tuple(
            Slot(i, update, number // rows, number % rows, offset, segment)
            for i, update, number, offset, segment in sorted(placed)
        ),
        updates=updates,
        micros=1 << max(max(used, default=1) - 1, 0).bit_length(),
        rows=rows,
        row_length=row_length,
        policy_length=min(-(-fullest // step) * step, row_length),
        used_micros=sum(used),
        used_tokens=int(sum(lengths)),
    )


def _row_length(longest: int, row_lengths: Sequence[int]) -> int:
    fitting = [length for length in row_lengths if length >= longest]
    if not fitting:
        raise ConfigError(
            f"packing.row_lengths={list(row_lengths)} has no row for a trajectory of {longest} "
            f"tokens; add a length of at least {longest}"
        )
    return min(fitting)


def _first_fit_decreasing(
    items: Sequence[tuple[int, int]], capacity: int
) -> list[list[tuple[int, int]]]:
    """Bins of (item, offset); ties keep their order, so only the sizes matter."""
    bins: list[list[tuple[int, int]]] = []
    filled: list[int] = []
    for item, size in sorted(items, key=lambda pair: -pair[1]):
        home = next((b for b, used in enumerate(filled) if used + size <= capacity), None)
        if home is None:
            home = len(bins)
            bins.append([])
            filled.append(0)
        bins[home].append((item, filled[home]))
        filled[home] += size
    return bins


def pack(trajectories: Sequence[Trajectory], plan: Plan) -> PackedBatch:
    """Write the trajectories into the rows the plan gave them.

    The mask of policy tokens comes from lengths and each trajectory's loss mask, never from token
    ids: a stop token that equals the padding token stays a policy token.

    Raises:
        DataError: When a trajectory has an empty prompt (its first token could not be predicted) or
            fields of different lengths.
    """
    shape = (plan.updates, plan.micros, plan.rows)
    tokens, positions, segment_ids = (
        np.zeros((*shape, plan.row_length), np.int32) for _ in range(3)
    )
    index, segments, targets, owner = (
        np.zeros((*shape, plan.policy_length), np.int32) for _ in range(4)
    )
    valid = np.zeros((*shape, plan.policy_length), bool)
    logprobs = np.zeros((*shape, plan.policy_length), np.float32)
    filled = np.zeros(shape, int)
    for slot in plan.slots:
        trajectory = trajectories[slot.trajectory]
        _check_lengths(trajectory)
        row = (slot.update, slot.micro, slot.row)
        ids = np.asarray(trajectory.ids, np.int32)
        span = slice(slot.offset, slot.offset + len(ids))
        tokens[row][span] = ids
        positions[row][span] = np.arange(len(ids))
        segment_ids[row][span] = slot.segment
        own = np.flatnonzero(trajectory.mask)
        here = slice(filled[row], filled[row] + len(own))
        filled[row] += len(own)
        index[row][here] = slot.offset + len(trajectory.prompt.ids) + own
        valid[row][here] = True
        segments[row][here] = slot.segment
        targets[row][here] = np.asarray(trajectory.response_ids, np.int32)[own]
        owner[row][here] = slot.trajectory
        logprobs[row][here] = np.asarray(trajectory.logprobs, np.float32)[own]
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        policy_index=index,
        policy_valid=valid,
        policy_segments=segments,
        policy_targets=targets,
        trajectory=owner,
        behaviour_logprobs=logprobs,
    )


def _check_lengths(trajectory: Trajectory) -> None:
    sizes = {
        "response_ids": len(trajectory.response_ids),
        "logprobs": len(trajectory.logprobs),
        "loss_mask": len(trajectory.mask),
    }
    if not trajectory.prompt.ids or len(set(sizes.values())) != 1 or not trajectory.response_ids:
        raise DataError(
            f"prompt row {trajectory.prompt.row}, sample {trajectory.sample}: a trajectory needs "
            f"at least one prompt token and equally long, non-empty fields; got "
            f"{len(trajectory.prompt.ids)} prompt tokens and {sizes}"
        )
