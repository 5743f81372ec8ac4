"""The sampler as pure functions: the prompts at once, then token by token with a KV cache.

`sample_batch` has all of it in the order of time. The engine compiles the parts (`stages`), so that
rows can be taken out, and room be added, between one `draw_on` and the next.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models import Cache, Model
from jaxrl.models.block import CACHED
from jaxrl.models.sampling import Knobs, draw
from jaxrl.sharding import constrain

__all__ = [
    "Prefilled",
    "Prompts",
    "Request",
    "Response",
    "State",
    "begin",
    "draw_on",
    "going",
    "prefill",
    "regroup",
    "sample_batch",
]


class Prompts(NamedTuple):
    """The prompts of a batch in rows; as many rows as prompts: one in each, on the right."""

    tokens: jax.Array
    """int32 [packed, columns]; columns: what the longest prompt has room in."""
    segments: jax.Array
    """int32 [packed, columns]: 1 + number of the token's prompt; 0: padding, whatever the id."""
    lasts: jax.Array
    """int32 [prompts]: where the last token of each is, counted through the rows."""
    lengths: jax.Array
    """int32 [prompts]."""


class Request(NamedTuple):
    """What is to be drawn; `rows` = prompts x samples, prompt-major."""

    keys: jax.Array
    """Typed keys [rows]."""
    limits: jax.Array
    """int32 [rows]: most tokens of each; 0 is a dummy row, which nobody waits for."""
    stop_ids: jax.Array
    """int32 [stops]; -1 is none."""
    knobs: Knobs


class Prefilled(NamedTuple):
    """What decoding needs of the prompts, padded on the left."""

    hidden: jax.Array
    """[prompts, embed]: of the last tokens."""
    k: jax.Array
    """[layers, prompts, kv_heads, columns, head_dim]."""
    v: jax.Array
    """Like k."""
    lengths: jax.Array
    """int32 [prompts]."""


class Response(NamedTuple):
    """What has been drawn; columns beyond a row's length hold nothing of meaning."""

    ids: jax.Array
    """int32 [rows, room]."""
    logprobs: jax.Array
    """float32 [rows, room], nats: what each token was drawn with."""
    lengths: jax.Array
    """int32 [rows]; the stop token counts."""
    stopped: jax.Array
    """bool [rows]; whether a stop token ended the response, rather than its limit."""
    steps: jax.Array
    """int32 scalar: tokens drawn a row, those of ended rows included."""


class State(NamedTuple):
    """Rows that are being drawn."""

    response: Response
    keys: jax.Array
    limits: jax.Array
    starts: jax.Array
    """int32 [rows]: tokens of the prompt."""
    tokens: jax.Array
    """int32 [rows]: drawn last."""
    cache: Cache


def sample_batch(
    model: Model,
    params: Any,
    prompts: Prompts,
    request: Request,
    *,
    samples: int,
    max_new_tokens: int,
    gather: bool = True,
) -> Response:
    """Sample one completion a row; all but `params`, `prompts` and `request` is static.

    On a mesh every device decodes its own rows; see `Model.for_sampling` for `gather`.
    """
    prefilled = prefill(model, params, prompts)
    weights = model.for_sampling(params, gather=gather)
    model = dataclasses.replace(model, gathered=gather)
    state = begin(model, weights, prefilled, request, samples=samples, room=max_new_tokens)
    return draw_on(model, weights, state, request).response


def prefill(model: Model, params: Any, prompts: Prompts) -> Prefilled:
    """Read the prompts, each once, however many samples it has."""
    tokens = constrain(model.mesh, prompts.tokens, ("batch", "time"))
    places = jnp.arange(tokens.size).reshape(tokens.shape)
    firsts = prompts.lasts - prompts.lengths + 1
    positions = jnp.maximum(places - firsts[prompts.segments - 1], 0)
    hidden, (k, v) = model.prefill(params, tokens, positions, prompts.segments)
    if len(tokens) == len(prompts.lasts):
        return Prefilled(hidden[:, -1], k, v, prompts.lengths)
    columns = tokens.shape[1]
    # Column by column from the last token back; what is before a prompt is never looked at.
    taken = jnp.maximum(prompts.lasts[:, None] - jnp.arange(columns)[None, ::-1], 0)

    def unpacked(array: jax.Array) -> jax.Array:
        layers, _, heads, _, size = array.shape
        tokens_first = array.swapaxes(2, 3).reshape(layers, -1, heads, size)
        return tokens_first[:, taken].swapaxes(2, 3)

    hidden = hidden.reshape(-1, hidden.shape[-1])[prompts.lasts]
    return Prefilled(hidden, unpacked(k), unpacked(v), prompts.lengths)


def begin(
    model: Model,
    weights: Any,
    prefilled: Prefilled,
    request: Request,
    *,
    samples: int,
    room: int,
) -> State:
    """`samples` rows for each prompt, with their first token, and room for so many in all.

    weights: from `Model.for_sampling`, here and in `draw_on`.
    """
    count, columns = len(request.keys), prefilled.k.shape[3]
    response = Response(
        ids=jnp.zeros((count, room), jnp.int32),
        logprobs=jnp.zeros((count, room), jnp.float32),
        lengths=jnp.zeros(count, jnp.int32),
        stopped=jnp.zeros(count, bool),
        steps=jnp.int32(0),
    )
    positions = jnp.arange(columns)[None] - (columns - prefilled.lengths)[:, None]
    cache = Cache(
        k=[constrain(model.mesh, jnp.repeat(k, samples, axis=0), CACHED) for k in prefilled.k],
        v=[constrain(model.mesh, jnp.repeat(v, samples, axis=0), CACHED) for v in prefilled.v],
        positions=jnp.repeat(jnp.maximum(positions, -1).astype(jnp.int32), samples, axis=0),
        index=jnp.int32(columns),
    )
    state = State(
        response=response,
        keys=request.keys,
        limits=request.limits,
        starts=jnp.repeat(prefilled.lengths, samples),
        tokens=jnp.zeros(count, jnp.int32),
        cache=_widened(cache, room - 1),
    )
    return _draw(model, weights, state, request, jnp.repeat(prefilled.hidden, samples, axis=0))


def draw_on(
    model: Model, weights: Any, state: State, request: Request, few: jax.Array | int = 0
) -> State:
    """Token after token, until at most `few` rows go on, or there is no room.

    Of `request` only stop ids and knobs are read.
    """

    def unfinished(state: State) -> jax.Array:
        steps, room = state.response.steps, state.response.ids.shape[1]
        return (jnp.sum(going(state)) > few) & (steps < room)

    def advance(state: State) -> State:
        positions = (state.starts + state.response.steps - 1)[:, None]
        hidden, cache = model.extend(weights, state.tokens[:, None], positions, state.cache)
        return _draw(model, weights, state._replace(cache=cache), request, hidden[:, 0])

    return jax.lax.while_loop(unfinished, advance, state)


def going(state: State) -> jax.Array:
    """Rows that get another token, bool [rows]."""
    return ~state.response.stopped & (state.response.steps < state.limits)


def regroup(state: State, left: jax.Array, *, room: int) -> State:
    """The rows `left` alone, with room for so many tokens."""
    state = jax.tree.map(lambda x: x[left] if x.ndim else x, state)
    more = room - state.response.ids.shape[1]
    response = state.response._replace(
        ids=jnp.pad(state.response.ids, ((0, 0), (0, more))),
        logprobs=jnp.pad(state.response.logprobs, ((0, 0), (0, more))),
    )
    return state._replace(response=response, cache=_widened(state.cache, more))


def _widened(cache: Cache, columns: int) -> Cache:
    """With so many more columns, empty."""

    def wider(array: jax.Array, axis: int, fill: int) -> jax.Array:
        widths = [(0, columns if i == axis else 0) for i in range(array.ndim)]
        return jnp.pad(array, widths, constant_values=fill)

    k, v = ([wider(array, 2, 0) for array in arrays] for arrays in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, positions=wider(cache.positions, 1, -1))


def _draw(model: Model, weights: Any, state: State, request: Request, hidden: jax.Array) -> State:
    """Draw the next token of every row from the hidden states that predict it."""
    past = state.response
    logits = model.logits(weights, hidden)
    logits = constrain(model.mesh, logits, ("batch", "tokens"))  # filters look at whole rows
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, past.steps)
    tokens, logprobs = draw(keys, logits, request.knobs)
    on = going(state)
    ends = jnp.any(tokens[:, None] == request.stop_ids[None], axis=-1)
    response = Response(
        ids=jax.lax.dynamic_update_slice(past.ids, tokens[:, None], (0, past.steps)),
        logprobs=jax.lax.dynamic_update_slice(past.logprobs, logprobs[:, None], (0, past.steps)),
        lengths=past.lengths + on,
        stopped=past.stopped | (on & ends),
        steps=past.steps + 1,
    )
    return state._replace(response=response, tokens=tokens)
