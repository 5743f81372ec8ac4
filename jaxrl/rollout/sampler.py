"""The compiled sampler: the prompts at once, then token by token until every row has ended.

Pure: weights, prompts, keys and settings in; ids, log-probabilities and lengths out. Prompts lie
packed in rows, so that what is computed for a batch is about what its prompts hold; and where most
rows have ended, the others go on in a smaller batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models import Cache, Model
from jaxrl.models.block import CACHED
from jaxrl.models.sampling import Knobs, draw
from jaxrl.sharding import constrain, row_multiple

__all__ = ["Prefilled", "Prompts", "Request", "Response", "decode", "prefill", "sample_batch"]

SHRINK = 4
"""Decoding goes on in a batch so many times smaller once the rows left fit into it."""
FEWEST = 16
"""Rows from which on that is done."""


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
    """What the sampler returns; columns beyond a row's length hold nothing of meaning."""

    ids: jax.Array
    """int32 [rows, max_new_tokens]."""
    logprobs: jax.Array
    """float32 [rows, max_new_tokens], nats: what each token was drawn with."""
    lengths: jax.Array
    """int32 [rows]; the stop token counts."""
    stopped: jax.Array
    """bool [rows]; whether a stop token ended the response, rather than its limit."""
    steps: jax.Array
    """int32 scalar: tokens drawn a row, before every row had ended."""
    drawn: jax.Array
    """int32 scalar: tokens drawn in all, those of ended rows included."""


class _Rows(NamedTuple):
    """What a row keeps to the end."""

    keys: jax.Array
    limits: jax.Array
    starts: jax.Array
    """Tokens of its prompt."""


class _State(NamedTuple):
    response: Response
    tokens: jax.Array
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
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "gather": gather}
    return decode(model, params, prefilled, request, samples=samples, **settings)


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


def decode(
    model: Model,
    params: Any,
    prefilled: Prefilled,
    request: Request,
    *,
    samples: int,
    max_new_tokens: int,
    gather: bool = True,
) -> Response:
    """Draw token after token, behind every prompt as often as it has samples."""
    params = model.for_sampling(params, gather=gather)
    model = dataclasses.replace(model, gathered=gather)
    count = len(request.keys)
    empty = Response(
        ids=jnp.zeros((count, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((count, max_new_tokens), jnp.float32),
        lengths=jnp.zeros(count, jnp.int32),
        stopped=jnp.zeros(count, bool),
        steps=jnp.int32(0),
        drawn=jnp.int32(0),
    )
    # The last token drawn is never fed back, so it needs no column.
    cache = _cache(model, prefilled, samples, max_new_tokens - 1)
    limits = jnp.minimum(request.limits, max_new_tokens)
    rows = _Rows(request.keys, limits, jnp.repeat(prefilled.lengths, samples))
    hidden = jnp.repeat(prefilled.hidden, samples, axis=0)
    state = _State(empty, jnp.zeros(count, jnp.int32), cache)
    state = _draw(model, params, request, rows, state, hidden)
    return _finish(model, params, request, rows, state)


def _finish(model: Model, params: Any, request: Request, rows: _Rows, state: _State) -> Response:
    """The response of these rows, once all have ended."""
    count = len(rows.limits)
    divided = model.mesh is not None and row_multiple(model.mesh) > 1
    few = 0 if divided or count < FEWEST else count // SHRINK

    def advance(state: _State) -> _State:
        positions = (rows.starts + state.response.steps - 1)[:, None]
        hidden, cache = model.extend(params, state.tokens[:, None], positions, state.cache)
        return _draw(model, params, request, rows, state._replace(cache=cache), hidden[:, 0])

    state = jax.lax.while_loop(lambda s: jnp.sum(_going(rows, s.response)) > few, advance, state)
    if not few:
        return state.response
    left = jnp.argsort(~_going(rows, state.response), stable=True)[:few]
    rows, fewer = jax.tree.map(lambda x: x[left] if x.ndim else x, (rows, state))
    rest = _finish(model, params, request, rows, fewer)
    return jax.tree.map(lambda all_, x: all_.at[left].set(x) if x.ndim else x, state.response, rest)


def _going(rows: _Rows, past: Response) -> jax.Array:
    """Rows that get another token."""
    return ~past.stopped & (past.steps < rows.limits)


def _draw(
    model: Model, params: Any, request: Request, rows: _Rows, state: _State, hidden: jax.Array
) -> _State:
    """Draw the next token of every row from the hidden states that predict it."""
    past = state.response
    logits = model.logits(params, hidden)
    logits = constrain(model.mesh, logits, ("batch", "tokens"))  # filters look at whole rows
    keys = jax.vmap(jax.random.fold_in, (0, None))(rows.keys, past.steps)
    tokens, logprobs = draw(keys, logits, request.knobs)
    going = _going(rows, past)
    ends = jnp.any(tokens[:, None] == request.stop_ids[None], axis=-1)
    response = Response(
        ids=jax.lax.dynamic_update_slice(past.ids, tokens[:, None], (0, past.steps)),
        logprobs=jax.lax.dynamic_update_slice(past.logprobs, logprobs[:, None], (0, past.steps)),
        lengths=past.lengths + going,
        stopped=past.stopped | (going & ends),
        steps=past.steps + 1,
        drawn=past.drawn + len(tokens),
    )
    return _State(response, tokens, state.cache)


def _cache(model: Model, prefilled: Prefilled, samples: int, room: int) -> Cache:
    """The prompts' keys and values for each of their samples, and `room` empty columns."""
    columns = prefilled.k.shape[3]
    positions = jnp.arange(columns)[None] - (columns - prefilled.lengths)[:, None]
    positions = jnp.maximum(positions, -1).astype(jnp.int32)

    def spread(array: jax.Array, axis: int, fill: int) -> jax.Array:
        array = jnp.repeat(array, samples, axis=0) if samples > 1 else array
        widths = [(0, room if i == axis else 0) for i in range(array.ndim)]
        return jnp.pad(array, widths, constant_values=fill)

    def layers(stacked: jax.Array) -> list[jax.Array]:
        return [constrain(model.mesh, spread(x, 2, 0), CACHED) for x in stacked]

    return Cache(
        k=layers(prefilled.k),
        v=layers(prefilled.v),
        positions=spread(positions, 1, -1),
        index=jnp.int32(columns),
    )
