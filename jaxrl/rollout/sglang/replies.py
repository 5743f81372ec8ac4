"""What is asked of /generate, and what makes its answer a trajectory.

SGLang's log-probabilities are of the whole softmax under the sampling temperature, whatever top_p,
top_k and min_p removed; where every request of a step is greedy they are at temperature 1. The stop
token is among the ids. An aborted request answers 200 with the tokens so far.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import RolloutError
from jaxrl.http_client import ServerError
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["BadReply", "Request", "check_sampling", "read_reply"]

log = logging.getLogger(__name__)

# Log-probabilities are computed in float32: the likeliest token of a sure model may round above 0.
_ROUNDING = 1e-4


class BadReply(ServerError):
    """An answer that is not what was asked for: partial, malformed, or from other weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One completion that is wanted; the same id however often it is asked for."""

    prompt: Prompt
    sample: int
    sampling: Sampling
    seed: int
    """For servers that draw each request from a seed of its own; others ignore it."""
    rid: str
    """Unique within the run."""
    version: int
    """Weight version at the time of asking."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"prompt row {self.prompt.row}, sample {self.sample}"

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /generate."""
        sampling = self.sampling
        return {
            "rid": self.rid,
            "input_ids": list(self.prompt.ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": self.seed,
            },
            "return_logprob": True,
        }


def check_sampling(sampling: Sampling) -> None:
    """Refuse what the server's log-probabilities would misreport.

    Raises:
        RolloutError: top_k = 1 beside a temperature: reported at temperature 1 or at the given one,
            depending on the company of the request.
    """
    if sampling.top_k == 1 and sampling.temperature not in (0.0, 1.0):
        raise RolloutError(
            f"top_k=1 with temperature={sampling.temperature} is greedy, for which SGLang reports "
            "log-probabilities at temperature 1; ask for temperature 0 or 1"
        )


def read_reply(
    reply: Any, request: Request, versions: Mapping[str, int], *, vocab_size: int
) -> Trajectory:
    """The trajectory in an answer to `request`.

    Args:
        reply: decoded JSON.
        request: what was asked.
        versions: weight version of each tag that was published.
        vocab_size: ids are below it.

    Raises:
        BadReply: naming the field, what it holds and what was expected.
    """
    try:
        meta = _field(reply, "meta_info", dict)
        ids = _field(reply, "output_ids", list)
        if meta.get("id") != request.rid:
            raise BadReply(f"meta_info.id is {meta.get('id')!r}, asked was {request.rid!r}")
        logprobs = _logprobs(_field(meta, "output_token_logprobs", list), ids)
        if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
            raise BadReply(f"output_ids {ids} go beyond the vocabulary of {vocab_size}")
        reason = _finish_reason(_field(meta, "finish_reason", dict), ids, request.sampling)
        by_token = _versions(meta, len(ids), versions, request.version)
    except BadReply as error:
        raise BadReply(f"{request.name}: {error}") from None
    return Trajectory(
        prompt=request.prompt,
        sample=request.sample,
        response_ids=tuple(ids),
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=by_token[0],
        token_versions=by_token if len(set(by_token)) > 1 else (),
    )


def _field(holder: Any, name: str, kind: type) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        found = f"{type(holder).__name__}" if not isinstance(holder, dict) else f"{value!r}"
        raise BadReply(
            f"the answer has no {name} ({found}); a router or proxy may have stripped it"
        )
    return value


def _logprobs(entries: list[Any], ids: list[Any]) -> tuple[float, ...]:
    """The log-probabilities, each beside the id it belongs to: [logprob, id, text]."""
    if len(entries) != len(ids):
        raise BadReply(f"{len(ids)} output_ids, but {len(entries)} output_token_logprobs")
    if [entry[1] for entry in entries] != ids:
        raise BadReply("the ids in output_token_logprobs are not output_ids")
    values = [entry[0] for entry in entries]
    for t, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value) or value > _ROUNDING:
            raise BadReply(f"the log-probability of response token {t} is {value!r}")
    return tuple(float(value) for value in values)


def _finish_reason(finish: dict[str, Any], ids: list[int], sampling: Sampling) -> Any:
    """What the engine says ended the answer; all that it implies about the ids is checked."""
    kind, stops, limit = finish.get("type"), sampling.stop_token_ids, sampling.max_new_tokens
    if kind == "abort":
        raise BadReply(f"aborted after {len(ids)} tokens: {finish.get('message')}")
    if kind not in ("stop", "length"):
        raise BadReply(f"finish_reason is {finish!r}; expected stop, length or abort")
    if not 1 <= len(ids) <= limit or (kind == "length" and len(ids) != limit):
        raise BadReply(f"{len(ids)} tokens with finish_reason {kind}, asked for at most {limit}")
    if kind == "stop" and ids[-1] not in stops:
        raise BadReply(
            f"the server stopped at token {ids[-1]}, which is not among the stop tokens "
            f"{list(stops)}; list its end-of-sequence ids in rollout.stop_token_ids"
        )
    early = [t for t, token in enumerate(ids[:-1]) if token in stops]
    if early:
        raise BadReply(f"stop token {ids[early[0]]} at {early[0]} did not end the answer")
    return kind


def _versions(
    meta: dict[str, Any], length: int, versions: Mapping[str, int], asked: int
) -> tuple[int, ...]:
    """Weight version of each token.

    From the spans that the server reports. A server that names only the version it had at the end
    may have begun with the one before: the older of that and `asked` is taken, as it is for one
    that names none.
    """
    spans = meta.get("weight_versions")
    if not spans:
        tag = meta.get("weight_version")
        if tag is None:
            _warn_of_no_version()
        return (asked if tag is None else min(asked, _known(tag, versions)),) * length
    found = [
        _known(span.get("version"), versions)
        for span in spans
        for _ in range(int(span["start"]), int(span["end"]))
    ]
    if len(found) != length:
        raise BadReply(f"weight_versions {spans} do not cover the {length} tokens once each")
    return tuple(found)


@functools.cache
def _warn_of_no_version() -> None:
    """Once a process: a router that strips it strips it from every answer."""
    log.warning(
        "an answer has no weight_version (a router or proxy may strip it): its tokens are taken to "
        "be of the version that was current when it was asked for"
    )


def _known(tag: Any, versions: Mapping[str, int]) -> int:
    if tag not in versions:
        raise BadReply(
            f"sampled with weights {tag!r}, which this run did not publish; the server was "
            "restarted, or somebody else updates it"
        )
    return versions[tag]
