"""Pack: trajectories written into the rows that `planning.plan` gave them.

Row space holds what the decoder sees, policy space what is trained and what is valued (`types`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.errors import DataError
from jaxrl.planning import Plan, Slot, plan
from jaxrl.types import PackedBatch, Trajectory

__all__ = ["Plan", "Slot", "pack", "packed_shapes", "plan", "slot_counts"]


def slot_counts(
    trajectories: Sequence[Trajectory], *, every_token: bool, end_state: bool
) -> list[int]:
    """Policy-space slots of each trajectory under the options of `pack`."""
    tokens = [len(t.response_ids) if every_token else sum(t.mask) for t in trajectories]
    return [count + end_state for count in tokens]


def pack(
    trajectories: Sequence[Trajectory],
    plan: Plan,
    *,
    every_token: bool = False,
    end_state: bool = False,
) -> PackedBatch:
    """Write the trajectories into the rows the plan gave them.

    The mask of policy tokens comes from lengths and each trajectory's loss mask, never from token
    ids: a stop token that equals the padding token stays a policy token.

    Args:
        trajectories: As the plan was made for.
        plan: Its `policy_lengths` are those of `slot_counts` with the same options.
        every_token: All tokens of a response are steps, not only the policy's own.
        end_state: Each trajectory gets one more slot, for the state after its last token.

    Raises:
        DataError: When a trajectory has an empty prompt (its first token could not be predicted) or
            fields of different lengths.
    """
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), packed_shapes(plan))
    filled = np.zeros((plan.updates, plan.micros, plan.rows), int)
    for slot in plan.slots:
        trajectory = trajectories[slot.trajectory]
        _check_lengths(trajectory)
        row = (slot.update, slot.micro, slot.row)
        _write_row(batch, row, slot, trajectory)
        steps = np.arange(len(trajectory.response_ids))
        steps = steps if every_token else steps[np.asarray(trajectory.mask, bool)]
        start = filled[row]
        _write_steps(batch, row, start, slot, trajectory, steps)
        filled[row] += len(steps)
        if end_state:
            _write_end(batch, row, filled[row], slot, trajectory)
            filled[row] += 1
    return batch


def packed_shapes(plan: Plan) -> PackedBatch:
    """Shape and dtype of every field of the batch that `pack` makes for this plan."""
    shape = (plan.updates, plan.micros, plan.rows)

    def field(length: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, length), np.dtype(dtype))

    row, slots = plan.row_length, plan.policy_length
    return PackedBatch(
        tokens=field(row, np.int32),
        positions=field(row, np.int32),
        segment_ids=field(row, np.int32),
        branch_ids=field(row, np.int32),
        policy_index=field(slots, np.int32),
        policy_before=field(slots, np.int32),
        policy_valid=field(slots, bool),
        policy_steps=field(slots, bool),
        policy_segments=field(slots, np.int32),
        policy_targets=field(slots, np.int32),
        trajectory=field(slots, np.int32),
        behaviour_logprobs=field(slots, np.float32),
        rewards=field(slots, np.float32),
    )


def _write_row(
    batch: PackedBatch, row: tuple[int, int, int], slot: Slot, trajectory: Trajectory
) -> None:
    """Row space: what the decoder sees of a trajectory."""
    length, response = len(trajectory.prompt.ids), len(trajectory.response_ids)
    prompt_span = slice(slot.prompt_offset, slot.prompt_offset + length)
    span = slice(slot.offset, slot.offset + response)
    batch.tokens[row][prompt_span] = trajectory.prompt.ids
    batch.tokens[row][span] = trajectory.response_ids
    batch.positions[row][prompt_span] = np.arange(length)
    batch.positions[row][span] = length + np.arange(response)
    batch.segment_ids[row][prompt_span] = batch.segment_ids[row][span] = slot.segment
    batch.branch_ids[row][span] = slot.branch


def _write_steps(
    batch: PackedBatch,
    row: tuple[int, int, int],
    start: int,
    slot: Slot,
    trajectory: Trajectory,
    steps: np.ndarray,
) -> None:
    """Policy space: the tokens of a response that are steps."""
    here = slice(start, start + len(steps))
    own = np.asarray(trajectory.mask, bool)[steps]
    prompt_end = slot.prompt_offset + len(trajectory.prompt.ids)
    batch.policy_index[row][here] = slot.offset + steps
    batch.policy_before[row][here] = np.where(steps == 0, prompt_end, slot.offset + steps) - 1
    batch.policy_valid[row][here] = own
    batch.policy_steps[row][here] = True
    batch.policy_segments[row][here] = slot.number
    batch.policy_targets[row][here] = np.asarray(trajectory.response_ids, np.int32)[steps]
    batch.trajectory[row][here] = slot.trajectory
    logprobs = np.asarray(trajectory.logprobs, np.float32)[steps]
    batch.behaviour_logprobs[row][here] = np.where(own, logprobs, 0.0)
    if trajectory.rewards and len(steps):
        # What is given between steps belongs to the step before: it is a consequence of that.
        at = np.searchsorted(steps, np.arange(len(trajectory.rewards)), side="right") - 1
        np.add.at(batch.rewards[row], start + np.maximum(at, 0), trajectory.rewards)


def _write_end(
    batch: PackedBatch, row: tuple[int, int, int], at: int, slot: Slot, trajectory: Trajectory
) -> None:
    """Policy space: the state after the last token, which is neither step nor policy token."""
    last = slot.offset + len(trajectory.response_ids) - 1
    batch.policy_index[row][at] = batch.policy_before[row][at] = last
    batch.policy_segments[row][at] = slot.number
    batch.trajectory[row][at] = slot.trajectory


def _check_lengths(trajectory: Trajectory) -> None:
    sizes = {
        "response_ids": len(trajectory.response_ids),
        "logprobs": len(trajectory.logprobs),
        "loss_mask": len(trajectory.mask),
        "rewards": len(trajectory.rewards or trajectory.response_ids),
    }
    if not trajectory.prompt.ids or len(set(sizes.values())) != 1 or not trajectory.response_ids:
        raise DataError(
            f"prompt row {trajectory.prompt.row}, sample {trajectory.sample}: a trajectory needs "
            f"at least one prompt token and equally long, non-empty fields; got "
            f"{len(trajectory.prompt.ids)} prompt tokens and {sizes}"
        )
