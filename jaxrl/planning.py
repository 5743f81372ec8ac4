"""The plan: which trajectory sits in which update, micro-batch, row and offset.

The plan is made once an iteration and used for the anchors and for the training forward alike, so
both see the same rows and shapes. It is host-side, numpy only, and a pure function of the lengths:
the same rollout batch is laid out the same way after a resume.

The samples of a prompt can share one copy of it: the prompt, then one response after the other,
each seeing the prompt and itself alone. What is computed for a prompt is then computed once.

Shapes come from few buckets, so that the number of compilations stays bounded: row lengths from the
config, the policy-token count of a row rounded up to an eighth of the row, micro-batches to a power
of two (empty ones are at the end and are never computed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.errors import ConfigError

__all__ = ["Plan", "Slot", "first_fit_decreasing", "plan"]

_POLICY_BUCKETS_PER_ROW = 8


@dataclass(frozen=True)
class Slot:
    """Where one trajectory lies."""

    trajectory: int
    update: int
    micro: int
    row: int
    prompt_offset: int
    """Where its prompt starts in the row."""
    offset: int
    """Where its response starts: behind the prompt, or behind other responses to that prompt."""
    segment: int
    """Number of its unit (a prompt with one or more responses) within the row."""
    branch: int
    """Number of its response within the unit."""
    number: int
    """Number of the trajectory within the row."""


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
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    policy_lengths: Sequence[int],
    *,
    updates: int,
    micro_batch_tokens: int,
    row_lengths: Sequence[int],
    row_multiple: int = 1,
    groups: Sequence[int] | None = None,
) -> Plan:
    """Lay trajectories out in rows.

    Trajectories are split over the updates in order, in parts that differ by at most one, so that
    the samples of a prompt stay together. Neighbours of one group then share a single copy of
    their prompt, as far as a row holds them: a unit. Within an update the longest units come
    first, each into the first row with room (first-fit decreasing), and rows fill micro-batches
    in order.

    Args:
        prompt_lengths: Tokens of each trajectory's prompt.
        response_lengths: Tokens of each response.
        policy_lengths: Policy-space slots of each (`slot_counts`): tokens the policy wrote, and
            what else needs a value.
        updates: Optimizer steps the batch is split into.
        micro_batch_tokens: Most tokens a micro-batch computes: rows times row length.
        row_lengths: Allowed row lengths.
        row_multiple: Rows of a micro-batch are a multiple of this (the mesh's batch axes).
        groups: Equal numbers mark trajectories with the same prompt. None: every one keeps its own.

    Raises:
        ConfigError: When no allowed row holds the longest trajectory, or the budget holds no row.
    """
    lengths = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    row_length = _row_length(max(lengths, default=1), row_lengths)
    rows = micro_batch_tokens // row_length // row_multiple * row_multiple
    if rows < 1:
        raise ConfigError(
            f"packing.micro_batch_tokens={micro_batch_tokens} holds no {row_multiple} row(s) of "
            f"{row_length} tokens; raise it to at least {row_multiple * row_length}"
        )
    slots: list[Slot] = []
    used_micros, used_tokens, most_micros, fullest = 0, 0, 1, 1
    for update, part in enumerate(np.array_split(np.arange(len(lengths)), updates)):
        units = _units(part.tolist(), prompt_lengths, response_lengths, groups, row_length)
        sizes = [prompt_lengths[unit[0]] + sum(response_lengths[i] for i in unit) for unit in units]
        bins = first_fit_decreasing(sizes, row_length)
        for number, content in enumerate(bins):
            place = (update, number // rows, number % rows)
            slots += _row_slots(place, content, units, prompt_lengths, response_lengths)
            fullest = max(fullest, sum(policy_lengths[i] for u, _ in content for i in units[u]))
        micros = -(-len(bins) // rows)
        used_micros, most_micros = used_micros + micros, max(most_micros, micros)
        used_tokens += sum(sizes)
    step = max(row_length // _POLICY_BUCKETS_PER_ROW, 1)
    return Plan(
        slots=tuple(sorted(slots, key=lambda slot: slot.trajectory)),
        updates=updates,
        micros=1 << (most_micros - 1).bit_length(),
        rows=rows,
        row_length=row_length,
        policy_length=min(-(-fullest // step) * step, row_length),
        used_micros=used_micros,
        used_tokens=used_tokens,
    )


def _units(
    part: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    groups: Sequence[int] | None,
    row_length: int,
) -> list[list[int]]:
    """Runs of trajectories that share a prompt and fit into one row together."""
    units: list[list[int]] = []
    size = 0
    for i in part:
        shares = bool(units) and groups is not None and groups[i] == groups[units[-1][0]]
        if shares and size + response_lengths[i] <= row_length:
            units[-1].append(i)
            size += response_lengths[i]
        else:
            units.append([i])
            size = prompt_lengths[i] + response_lengths[i]
    return units


def _row_slots(
    place: tuple[int, int, int],
    content: Sequence[tuple[int, int]],
    units: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> list[Slot]:
    """Slots of the units in one row; content is (unit, offset)."""
    slots: list[Slot] = []
    for segment, (unit, start) in enumerate(content, start=1):
        offset = start + prompt_lengths[units[unit][0]]
        for branch, i in enumerate(units[unit], start=1):
            slots.append(Slot(i, *place, start, offset, segment, branch, len(slots) + 1))
            offset += response_lengths[i]
    return slots


def _row_length(longest: int, row_lengths: Sequence[int]) -> int:
    fitting = [length for length in row_lengths if length >= longest]
    if not fitting:
        raise ConfigError(
            f"packing.row_lengths={list(row_lengths)} has no row for a trajectory of {longest} "
            f"tokens; add a length of at least {longest}"
        )
    return min(fitting)


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[tuple[int, int]]]:
    """Bins of (item, offset); ties keep their order, so only the sizes matter."""
    bins: list[list[tuple[int, int]]] = []
    filled: list[int] = []
    for item, size in sorted(enumerate(sizes), key=lambda pair: -pair[1]):
        home = next((b for b, used in enumerate(filled) if used + size <= capacity), None)
        if home is None:
            home = len(bins)
            bins.append([])
            filled.append(0)
        bins[home].append((item, filled[home]))
        filled[home] += size
    return bins
