"""The plan and the packed rows: layout, masks from lengths, shapes from buckets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import ConfigError, DataError
from jaxrl.packing import pack, plan, slot_counts
from jaxrl.types import Prompt, Trajectory


def trajectory(
    prompt: list[int], response: list[int], mask: tuple[bool, ...] = (), base: float = 0.0
) -> Trajectory:
    return Trajectory(
        prompt=Prompt(row=0, ids=tuple(prompt), text="", columns={}),
        sample=0,
        response_ids=tuple(response),
        logprobs=tuple(base - 0.5 * i for i in range(len(response))),
        finish_reason="stop",
        loss_mask=mask,
    )


def lay(trajectories: list[Trajectory], **options: object):
    settings = {"updates": 1, "micro_batch_tokens": 16, "row_lengths": [8]} | options
    prompts = [len(t.prompt.ids) for t in trajectories]
    responses = [len(t.response_ids) for t in trajectories]
    own = [sum(t.mask) for t in trajectories]
    return plan(prompts, responses, own, **settings)


def test_two_trajectories_share_a_row_by_hand():
    # Lengths 5 and 3 fill a row of 8; the longer one comes first.
    a = trajectory([7], [5, 6])
    b = trajectory([1, 2, 3], [9, 2], base=-1.0)
    layout = lay([a, b])
    packed = pack([a, b], layout)
    assert (layout.micros, layout.rows, layout.row_length, layout.policy_length) == (1, 2, 8, 4)
    row = (0, 0, 0)
    assert packed.tokens[row].tolist() == [1, 2, 3, 9, 2, 7, 5, 6]
    # PK-02: positions start again at 0 in every segment.
    assert packed.positions[row].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert packed.segment_ids[row].tolist() == [1, 1, 1, 1, 1, 2, 2, 2]
    assert packed.branch_ids[row].tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert packed.policy_index[row].tolist() == [6, 7, 3, 4]
    assert packed.policy_before[row].tolist() == [5, 6, 2, 3]
    assert packed.policy_targets[row].tolist() == [5, 6, 9, 2]
    assert packed.policy_segments[row].tolist() == [2, 2, 1, 1]
    assert packed.trajectory[row].tolist() == [0, 0, 1, 1]
    assert packed.behaviour_logprobs[row].tolist() == [0.0, -0.5, -1.0, -1.5]
    assert packed.policy_valid[row].all() and not packed.policy_valid[0, 0, 1].any()
    assert layout.efficiency == 0.5  # one of two rows is empty


def test_samples_of_a_prompt_share_it_by_hand():
    """Prompt [1, 2], responses [5, 6] and [7]; a third trajectory has another prompt."""
    a, b, c = trajectory([1, 2], [5, 6]), trajectory([1, 2], [7]), trajectory([3], [8, 9])
    layout = lay([a, b, c], groups=[0, 0, 1])
    packed = pack([a, b, c], layout)
    row = (0, 0, 0)
    assert packed.tokens[row].tolist() == [1, 2, 5, 6, 7, 3, 8, 9]
    assert packed.positions[row].tolist() == [0, 1, 2, 3, 2, 0, 1, 2]
    assert packed.segment_ids[row].tolist() == [1, 1, 1, 1, 1, 2, 2, 2]
    assert packed.branch_ids[row].tolist() == [0, 0, 1, 1, 2, 0, 1, 1]
    assert packed.policy_index[row].tolist()[:5] == [2, 3, 4, 6, 7]
    assert packed.policy_before[row].tolist()[:5] == [1, 2, 1, 5, 6]  # both start from token 1
    assert packed.policy_segments[row].tolist()[:5] == [1, 1, 2, 3, 3]
    assert packed.trajectory[row].tolist()[:5] == [0, 0, 1, 2, 2]
    assert layout.used_tokens == 8


def test_samples_that_do_not_fit_one_row_share_in_several():
    ts = [trajectory([1, 2, 3], [4, 5]) for _ in range(4)]  # 3 + 2 + 2 fit into 8, 3 + 6 do not
    layout = lay(ts, groups=[0] * 4)
    assert [(s.row, s.segment, s.branch) for s in layout.slots] == [
        *((0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 1, 2))
    ]


def test_tk02_a_stop_token_equal_to_the_padding_id_stays_a_policy_token():
    packed = pack([trajectory([3], [5, 6, 0])], lay([trajectory([3], [5, 6, 0])]))
    assert packed.policy_valid[0, 0, 0].tolist()[:3] == [True, True, True]
    assert packed.segment_ids[0, 0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_tool_tokens_are_in_the_row_but_not_among_the_policy_tokens():
    t = trajectory([3], [5, 6, 7, 8], mask=(True, False, False, True))
    packed = pack([t], lay([t]))
    assert packed.tokens[0, 0, 0].tolist()[:5] == [3, 5, 6, 7, 8]
    assert packed.policy_index[0, 0, 0].tolist()[:2] == [1, 4]
    assert packed.policy_valid[0, 0, 0].sum() == 2
    assert packed.behaviour_logprobs[0, 0, 0].tolist()[:2] == [0.0, -1.5]


def test_slots_for_every_token_and_for_the_state_after_the_last_by_hand():
    """One trajectory with a tool's two tokens inside and one behind, and one without any."""
    a = dataclasses.replace(
        trajectory([7, 8], [1, 2, 3, 4, 5], (True, False, False, True, False)),
        rewards=(0.0, 0.5, 0.25, 0.0, 2.0),
    )
    b = trajectory([9], [6])
    for every_token, end_state in ((False, False), (True, False), (False, True), (True, True)):
        options = {"every_token": every_token, "end_state": end_state}
        counts = slot_counts([a, b], **options)
        assert counts == [(5 if every_token else 2) + end_state, 1 + end_state]
        layout = plan([2, 1], [5, 1], counts, updates=1, micro_batch_tokens=16, row_lengths=[16])
        packed = pack([a, b], layout, **options)
        row = slice(0, sum(counts))
        end_a, end_b = ([x] * end_state for x in (True, True))
        steps = [True] * (counts[0] - end_state) + [not x for x in end_a]
        steps += [True] + [not x for x in end_b]
        own = [True, False, False, True, False] if every_token else [True, True]
        valid = own + [False] * end_state + [True] + [False] * end_state
        index = [2, 3, 4, 5, 6] if every_token else [2, 5]
        assert packed.policy_steps[0, 0, 0][row].tolist() == steps
        assert packed.policy_valid[0, 0, 0][row].tolist() == valid
        assert packed.policy_segments[0, 0, 0][row].tolist() == [1] * counts[0] + [2] * counts[1]
        # The state behind the last token is read at that token, every other one before its own.
        before = [i - 1 for i in index] + [6] * end_state + [7] + [8] * end_state
        assert packed.policy_before[0, 0, 0][row].tolist() == before
        # A reward where no step is belongs to the step before it.
        rewards = [0, 0.5, 0.25, 0, 2] if every_token else [0.75, 2]
        expected = rewards + [0] * end_state + [0] + [0] * end_state
        assert packed.rewards[0, 0, 0][row].tolist() == expected
        for field in dataclasses.fields(packed):  # and nothing behind
            if field.name.startswith(("policy", "rewards", "trajectory", "behaviour")):
                assert not getattr(packed, field.name)[0, 0, 0][row.stop :].any()


def test_a_reward_before_the_first_step_counts_at_the_first():
    t = dataclasses.replace(trajectory([7], [1, 2], (False, True)), rewards=(3.0, 0.5))
    packed = pack([t], lay([t]))
    assert (
        packed.rewards[0, 0, 0].tolist() == [3.5, 0, 0, 0, 0, 0, 0, 0][: packed.rewards.shape[-1]]
    )


def test_micro_batches_are_a_power_of_two_with_the_empty_ones_last():
    ts = [trajectory([1] * 4, [2] * 4) for _ in range(5)]  # five full rows, two rows a micro-batch
    packed = pack(ts, lay(ts))
    assert packed.tokens.shape == (1, 4, 2, 8)
    assert packed.policy_valid.any(axis=(-1, -2)).tolist() == [[True, True, True, False]]


def test_updates_split_in_order_and_by_at_most_one():
    ts = [trajectory([1], [2, i]) for i in range(7)]
    layout = lay(ts, updates=3)
    members = [[s.trajectory for s in layout.slots if s.update == u] for u in range(3)]
    assert [sorted(m) for m in members] == [[0, 1, 2], [3, 4], [5, 6]]


def test_row_multiple_rounds_the_rows_down():
    assert lay([trajectory([1], [2])], micro_batch_tokens=56, row_multiple=4).rows == 4


def test_smallest_row_that_holds_the_longest_is_taken():
    ts = [trajectory([1], [2] * 10)]
    assert lay(ts, row_lengths=[64, 8, 16]).row_length == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_lengths": [2]}, r"packing.row_lengths=\[2\].*3 tokens"),
        ({"micro_batch_tokens": 7}, "packing.micro_batch_tokens=7.*at least 8"),
        ({"micro_batch_tokens": 16, "row_multiple": 4}, "at least 32"),
    ],
)
def test_a_budget_that_cannot_hold_a_row_says_what_would(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        lay([trajectory([1], [2, 3])], **options)


@pytest.mark.parametrize(
    "bad",
    [
        trajectory([], [1]),
        trajectory([1], []),
        trajectory([1], [1, 2], mask=(True,)),
    ],
)
def test_inconsistent_trajectories_are_refused(bad: Trajectory):
    good = trajectory([1], [2])
    with pytest.raises(DataError, match="prompt row 0, sample 0"):
        pack([bad], lay([good]))


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=40),
    updates=st.integers(1, 4),
)
def test_every_token_lies_in_exactly_one_place(sizes: list[tuple[int, int]], updates: int):
    ts = [
        trajectory(list(range(100 * i, 100 * i + p)), list(range(100 * i + 50, 100 * i + 50 + r)))
        for i, (p, r) in enumerate(sizes)
    ]
    layout = lay(ts, updates=updates, row_lengths=[16, 32], micro_batch_tokens=64)
    assert len({(s.update, s.micro, s.row, s.prompt_offset) for s in layout.slots}) == len(ts)
    packed = pack(ts, layout)
    used = packed.segment_ids > 0
    assert sorted(packed.tokens[used].tolist()) == sorted(t for x in ts for t in x.ids)
    policy = sorted(packed.policy_targets[packed.policy_valid].tolist())
    assert policy == sorted(t for x in ts for t in x.response_ids)
    # The target is the token at its index, and its segment is that position's.
    at = np.take_along_axis(packed.tokens, packed.policy_index, axis=-1)
    segment = np.take_along_axis(packed.segment_ids, packed.policy_index, axis=-1)
    valid = packed.policy_valid
    assert (at[valid] == packed.policy_targets[valid]).all()
    assert (segment[valid] == packed.policy_segments[valid]).all()
    assert (packed.policy_index[valid] > 0).all()
    assert layout.efficiency <= 1.0


def test_ragged_lengths_fill_rows_well():
    lengths = np.random.default_rng(0).integers(20, 400, 256).tolist()
    layout = plan(
        [0] * 256, lengths, lengths, updates=1, micro_batch_tokens=4096, row_lengths=[1024]
    )
    assert layout.efficiency > 0.95
