"""Faults of other trainers that no test of a module has by name, with their exact inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from iterating import iterations, made_up, toy_config, toy_state
from stepping import lay_out, make_trajectories, one, prepare

from jaxrl.config import AlgorithmConfig
from jaxrl.iteration import _finish
from jaxrl.outcomes import judge
from jaxrl.packing import pack, plan
from jaxrl.rollout.sglang.replies import BadReply, Request, read_reply
from jaxrl.rollouts import Batch
from jaxrl.scoring import Scores
from jaxrl.steps import Forward, policy_outputs, predicting_hidden
from jaxrl.types import Prompt, Sampling, Trajectory

PROMPT = Prompt(row=0, ids=(1, 2, 3), text="", columns={})


def said(*ids: int, reason: Any = "stop", row: int = 0, sample: int = 0) -> Trajectory:
    return Trajectory(
        prompt=dataclasses.replace(PROMPT, row=row),
        sample=sample,
        response_ids=ids,
        logprobs=(-1.0,) * len(ids),
        finish_reason=reason,
    )


def batch_of(trajectories: list[Trajectory], scores: list[float]) -> Batch:
    prompts = list({t.prompt.row: t.prompt for t in trajectories}.values())
    values = np.array(scores, np.float32)
    return Batch(prompts, trajectories, Scores(values, np.isfinite(values), {}), {}, {})


# --- advantages ---


def test_gae05_truncated_is_what_the_engine_calls_so() -> None:
    """3 tokens cut by the limit and 5 that ended, padded to 5: widths would say the opposite."""
    cut, whole = said(5, 6, 7, reason="length"), said(5, 6, 7, 8, 9, sample=1)
    assert [cut.truncated, whole.truncated] == [True, False]
    config = toy_config("rollout.prompts=1", "algorithm.truncated=zero")
    outcomes, usable, _ = judge(config, 0, batch_of([cut, whole], [1.0, 1.0]), np.zeros(3))
    assert usable.all()
    assert outcomes.truncated.tolist() == [True, False]
    np.testing.assert_array_equal(outcomes.scores, [0.0, 1.0])
    _, metrics = iterations(config, [([cut, whole], Scores(np.ones(2), np.ones(2, bool), {}))])
    assert metrics[0]["rollout/truncated_fraction"] == 0.5


def test_gae13_responses_of_one_token_are_trained_on() -> None:
    algorithm = AlgorithmConfig(gamma=0.99, whiten="off")
    ts = [
        dataclasses.replace(t, response_ids=t.response_ids[:1], logprobs=(-1.0,), loss_mask=())
        for t in make_trajectories(8)
    ]
    packed = lay_out(ts)
    state, update, batch, figures, anchors = prepare(algorithm, ts, packed)
    valid = np.asarray(packed.policy_valid)
    scores = np.random.default_rng(5).normal(size=len(ts)).astype(np.float32)
    score = scores[np.asarray(packed.trajectory)][valid]
    value = np.asarray(anchors.old_values)[valid]
    assert valid.sum() == 8
    np.testing.assert_allclose(np.asarray(batch.advantages)[valid], score - value, atol=1e-6)
    np.testing.assert_allclose(np.asarray(batch.returns)[valid], score, atol=1e-6)
    after, metrics = update(state, one(batch))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((figures, metrics, after)))
    assert int(after.skipped) == 0


def test_gae16_values_are_read_before_their_token() -> None:
    """A critic that says 0, 1, 2, 3, 4 along prompt 3 + response 2: the response's are 2 and 3."""
    layout = plan([3], [2], [2], updates=1, micro_batch_tokens=5, row_lengths=[5])
    packed = jax.tree.map(lambda a: jnp.asarray(a)[0, 0], pack([said(4, 5)], layout))
    along = jnp.arange(5.0)[None, :, None]
    forward = Forward(
        lambda *_: along,
        lambda _: jnp.ones((1, 11)),
        lambda _, hidden, rows: predicting_hidden(hidden, rows)[..., 0],
    )
    values = policy_outputs(forward, {}, {}, packed, chunk_size=None, temperature=1.0)[2]
    assert values[np.asarray(packed.policy_valid)].tolist() == [2.0, 3.0]


# --- KL ---


@pytest.mark.parametrize(
    ("settings", "kl", "expected"),
    [
        (("algorithm.kl_target=0.1", "algorithm.kl_horizon=10000"), 0.2, 0.100512),
        (("algorithm.kl_target=0.1", "algorithm.kl_horizon=10000"), 0.05, 0.099488),
        ((), 0.2, 0.1),
    ],
)
def test_kl06_a_coefficient_adapts_by_the_rule_or_stays(
    settings: tuple[str, ...], kl: float, expected: float
) -> None:
    """256 responses whose KL adds up to 256 times the mean KL of one."""
    config = toy_config("algorithm.kl_in=reward", "algorithm.kl_coef=0.1", *settings)
    figures = {"kl/reference_sum": 256 * kl}
    after = _finish(config, toy_state(config), figures, 256, np.zeros(3))
    np.testing.assert_allclose(after.kl_coef, expected, rtol=1e-6)
    nothing = _finish(config, toy_state(config), {"kl/reference_sum": 0.0}, 0, np.zeros(3))
    np.testing.assert_allclose(nothing.kl_coef, 0.1, rtol=1e-6)  # no response, no evidence


def test_ag04_an_iteration_of_truncated_responses_that_are_masked_moves_nothing() -> None:
    config = toy_config("algorithm.truncated=mask", "optim.policy.weight_decay=0.1")
    ts = [said(5, 6, 7, reason="length", row=i // 2, sample=i % 2) for i in range(12)]
    scores = Scores(np.arange(12, dtype=np.float32), np.ones(12, bool), {})
    state, metrics = iterations(config, [(ts, scores)])
    before = toy_state(config)
    for name in ("policy_params", "value_params", "policy_opt", "value_opt"):
        for a, b in zip(
            jax.tree.leaves(getattr(state, name)),
            jax.tree.leaves(getattr(before, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert metrics[0]["loss"] == metrics[0]["policy/tokens"] == 0.0
    assert int(state.skipped) == 0 and int(state.iteration) == 1


# --- tokens that a server reports ---


def answered(ids: list[int], finish: dict[str, Any], limit: int = 3) -> Trajectory:
    request = Request(
        prompt=PROMPT,
        sample=0,
        sampling=Sampling(max_new_tokens=limit, stop_token_ids=(2,)),
        seed=1,
        rid="r",
        version=0,
    )
    meta = {
        "id": "r",
        "finish_reason": finish,
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "completion_tokens": len(ids),
    }
    reply = {"text": "what decoding leaves", "output_ids": ids, "meta_info": meta}
    return read_reply(reply, request, {}, vocab_size=100)


def test_tk07_special_tokens_inside_a_response_stay() -> None:
    """99 is an added special token, which decoding drops: the text decides nothing."""
    got = answered([5, 99, 2], {"type": "stop", "matched": 2})
    assert got.response_ids == (5, 99, 2) and len(got.logprobs) == 3


def test_tk08_a_trimmed_stop_token_is_refused_not_made_up() -> None:
    """Ids end with the stop token; a server that trims it is told by name, and asked again."""
    whole = answered([5, 6, 2], {"type": "stop", "matched": 2})
    assert not whole.truncated and len(whole.response_ids) == len(whole.logprobs) == 3
    with pytest.raises(BadReply, match="stopped at token 6, which is not among the stop tokens"):
        answered([5, 6], {"type": "stop", "matched": 2})


def test_tk09_a_response_cut_by_the_limit_keeps_its_last_token() -> None:
    got = answered([5, 6, 77], {"type": "length", "length": 3})
    assert got.response_ids[-1] == 77 and got.truncated


# --- batches ---


def test_ds08_rows_with_one_text_are_groups_of_their_own() -> None:
    """Two rows of equal text with rewards [0, 0] and [1, 1]: within each, nothing is better."""
    config = toy_config("rollout.prompts=2", "algorithm.advantage_mode=grpo")
    ts = [said(5, 2, row=row, sample=sample) for row in (0, 1) for sample in (0, 1)]
    assert len({t.prompt.ids for t in ts}) == 1
    outcomes, _, _ = judge(config, 0, batch_of(ts, [0, 0, 1, 1]), np.zeros(3))
    assert outcomes.groups.tolist() == [0, 0, 1, 1]
    _, metrics = iterations(config, [(ts, Scores(np.array([0.0, 0, 1, 1]), np.ones(4, bool), {}))])
    assert metrics[0]["policy/grad_norm"] == 0.0


def test_cf05_six_responses_in_four_updates_are_all_trained_on() -> None:
    """6 responses, 4 updates, 3 rows a micro-batch: each is in one update, none is left out."""
    ts, _ = made_up(6)
    layout = plan(
        [len(t.prompt.ids) for t in ts],
        [len(t.response_ids) for t in ts],
        [sum(t.mask) for t in ts],
        updates=4,
        micro_batch_tokens=48,
        row_lengths=[16],
    )
    assert (layout.rows, layout.updates) == (3, 4)
    packed = pack(ts, layout)
    by_update = [
        set(np.asarray(packed.trajectory)[u][np.asarray(packed.policy_valid)[u]].tolist())
        for u in range(4)
    ]
    assert sorted(i for part in by_update for i in part) == list(range(6))
    assert [len(part) for part in by_update] == [2, 2, 1, 1]
    assert int(np.asarray(packed.policy_valid).sum()) == sum(sum(t.mask) for t in ts)
