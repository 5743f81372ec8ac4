"""What is asked of /generate and what is accepted: replies as SGLang 0.5.23 words them, altered."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest

from jaxrl.errors import RolloutError
from jaxrl.rollout.sglang.replies import BadReply, Request, check_sampling, read_reply
from jaxrl.types import Prompt, Sampling

PROMPT = Prompt(row=3, ids=(10, 20, 30, 40, 50), text="", columns={})
REQUEST = Request(
    prompt=PROMPT,
    sample=1,
    sampling=Sampling(max_new_tokens=3, temperature=0.7, stop_token_ids=(2, 9)),
    seed=11,
    rid="run-0-5",
    version=6,
)
VERSIONS = {"run-5": 5, "run-6": 6, "run-7": 7}


def reply(**meta: Any) -> dict[str, Any]:
    """The form of a real answer, three tokens long."""
    answer = {
        "text": " qcdr",
        "output_ids": [331, 69, 458],
        "meta_info": {
            "id": "run-0-5",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "weight_version": "run-6",
            "num_retractions": 0,
            "input_token_logprobs": [[None, 10, None], [-7.1, 20, None]],
            "output_token_logprobs": [[-2.5, 331, None], [-1.75, 69, None], [-1.5, 458, None]],
            "output_token_logprobs_length": 3,
            "completion_tokens": 3,
            "weight_versions": [{"version": "run-6", "start": 0, "end": 3}],
        },
    }
    answer["meta_info"] |= meta
    return answer


def read(answer: Any, request: Request = REQUEST) -> Any:
    return read_reply(answer, request, VERSIONS, vocab_size=512)


def test_a_whole_answer_becomes_a_trajectory():
    got = read(reply())
    assert got.response_ids == (331, 69, 458)
    assert got.logprobs == (-2.5, -1.75, -1.5)
    assert (got.finish_reason, got.weight_version, got.token_versions) == ("length", 6, ())
    assert got.prompt is PROMPT and got.sample == 1


def test_the_stop_token_belongs_to_the_answer():
    answer = reply(
        finish_reason={"type": "stop", "matched": 9},
        output_token_logprobs=[[-2.5, 331, None], [-0.25, 9, None]],
        weight_versions=[{"version": "run-6", "start": 0, "end": 2}],
    )
    answer["output_ids"] = [331, 9]
    got = read(answer)
    assert got.response_ids == (331, 9) and got.finish_reason == "stop"


def test_the_request_asks_for_exactly_the_sampling_settings():
    body = REQUEST.body()
    assert body["input_ids"] == [10, 20, 30, 40, 50] and body["rid"] == "run-0-5"
    assert body["return_logprob"] is True and "text" not in body
    assert body["sampling_params"] == {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop_token_ids": [2, 9],
        "sampling_seed": 11,
    }
    # ignore_eos would switch the stop tokens off as well
    assert "ignore_eos" not in body["sampling_params"]


def without(answer: dict[str, Any], *path: str) -> dict[str, Any]:
    answer = copy.deepcopy(answer)
    place = answer
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return answer


BAD = {
    "RC-12 no ids": (without(reply(), "output_ids"), "no output_ids"),
    "RC-12 no meta_info": ({"text": "x", "output_ids": [1]}, "no meta_info"),
    "RC-12 text only": ({"text": "x"}, "no meta_info"),
    "RC-12 no log-probs": (
        without(reply(), "meta_info", "output_token_logprobs"),
        "no output_token_logprobs",
    ),
    "not an object": ([], "no meta_info"),
    "too few results": ([reply()], "no meta_info"),
    "another request's answer": (reply(id="run-0-4"), "run-0-4.*run-0-5"),
    "RC-10 lengths": (
        reply(output_token_logprobs=[[-1.0, 331, None], [-1.0, 69, None]]),
        "3 output_ids, but 2",
    ),
    "RC-10 ids": (
        reply(output_token_logprobs=[[-2.5, 331, None], [-1.75, 70, None], [-1.5, 458, None]]),
        "are not output_ids",
    ),
    "RC-09 null": (
        reply(output_token_logprobs=[[None, 331, None], [-1.75, 69, None], [-1.5, 458, None]]),
        "token 0 is None",
    ),
    "RC-09 nan": (
        reply(output_token_logprobs=[[-2.5, 331, None], [math.nan, 69, None], [-1.5, 458, None]]),
        "token 1 is nan",
    ),
    "RC-09 -inf": (
        reply(output_token_logprobs=[[-2.5, 331, None], [-1.75, 69, None], [-math.inf, 458, None]]),
        "token 2 is -inf",
    ),
    "not a probability": (
        reply(output_token_logprobs=[[-2.5, 331, None], [0.5, 69, None], [-1.5, 458, None]]),
        "token 1 is 0.5",
    ),
    "aborted": (reply(finish_reason={"type": "abort", "message": "Aborted"}), "aborted after 3"),
    "unfinished": (reply(finish_reason=None), "no finish_reason"),
    "unknown reason": (reply(finish_reason={"type": "tired"}), "tired"),
    "a stop that is none": (
        reply(finish_reason={"type": "stop", "matched": 458}),
        "stop_token_ids",
    ),
    "other weights": (
        reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]),
        "'default', which this run did not publish",
    ),
    "a gap in the versions": (
        reply(weight_versions=[{"version": "run-6", "start": 0, "end": 2}]),
        "do not cover the 3 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_a_whole_answer_is_refused_by_name(case: str):
    answer, message = BAD[case]
    with pytest.raises(BadReply, match=message) as caught:
        read(answer)
    assert str(caught.value).startswith("prompt row 3, sample 1: ")


def test_ids_and_lengths_beyond_what_was_asked_are_refused():
    with pytest.raises(BadReply, match="vocabulary of 400"):
        read_reply(reply(), REQUEST, VERSIONS, vocab_size=400)
    short = dataclasses.replace(REQUEST, sampling=Sampling(max_new_tokens=2))
    with pytest.raises(BadReply, match="3 tokens .* at most 2"):
        read(reply(), short)
    long = dataclasses.replace(REQUEST, sampling=Sampling(max_new_tokens=4))
    with pytest.raises(BadReply, match="3 tokens with finish_reason length, asked for at most 4"):
        read(reply(), long)
    early = dataclasses.replace(REQUEST, sampling=Sampling(max_new_tokens=3, stop_token_ids=(69,)))
    with pytest.raises(BadReply, match="stop token 69 at 1 did not end"):
        read(reply(), early)


def test_ws04_versions_are_those_that_sampled_not_that_of_the_reply():
    spans = [
        {"version": "run-6", "start": 0, "end": 1},
        {"version": "run-7", "start": 1, "end": 3},
    ]
    got = read(reply(weight_version="run-7", weight_versions=spans))
    assert got.weight_version == 6 and got.token_versions == (6, 7, 7)
    # A server without spans names the version at the end: asked under 6, it may have begun with it.
    assert read(reply(weight_version="run-7", weight_versions=None)).weight_version == 6
    assert read(reply(weight_version="run-5", weight_versions=None)).weight_version == 5


def test_rc12_a_reply_without_a_version_is_of_the_one_that_was_asked(
    caplog: pytest.LogCaptureFixture,
):
    answer = without(
        without(reply(), "meta_info", "weight_versions"), "meta_info", "weight_version"
    )
    assert read(answer).weight_version == read(answer).weight_version == 6
    assert [r.levelname for r in caplog.records if "no weight_version" in r.message] == ["WARNING"]


def test_greedy_beside_a_temperature_is_refused():
    check_sampling(Sampling(max_new_tokens=1, temperature=0.0))
    check_sampling(Sampling(max_new_tokens=1, temperature=1.0, top_k=1))
    check_sampling(Sampling(max_new_tokens=1, temperature=0.5, top_k=2))
    with pytest.raises(RolloutError, match="top_k=1 with temperature=0.5"):
        check_sampling(Sampling(max_new_tokens=1, temperature=0.5, top_k=1))
