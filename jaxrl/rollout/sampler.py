"""The compiled sampler: prefill the prompts once, then decode with a KV cache until all rows stop.

Pure: weights, prompts, keys and settings in; ids, log-probabilities and lengths out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.models import Cache, Model
from jaxrl.models.sampling import Knobs, draw
from jaxrl.sharding import constrain

__all__ = ["Request", "Response", "sample_batch"]


class Request(NamedTuple):
    """One batch as the sampler takes it; `rows` = prompts x samples, prompt-major."""

    tokens: jax.Array
    """int32 [prompts, columns], padded on the left."""
    lengths: jax.Array
    """int32 [prompts]; what is left of it is padding, whatever id stands there."""
    keys: jax.Array
    """Typed keys [rows]."""
    limits: jax.Array
    """int32 [rows]: most tokens of each; 0 is a dummy row, which nobody waits for."""
    stop_ids: jax.Array
    """int32 [stops]; -1 is none."""
    knobs: Knobs


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


class _State(NamedTuple):
    response: Response
    tokens: jax.Array
    cache: Cache


def sample_batch(
    model: Model,
    params: Any,
    request: Request,
    *,
    samples: int,
    max_new_tokens: int,
    gather: bool = True,
) -> Response:
    """Sample one completion a row; all but `params` and `request` is static.

    On a mesh every device decodes its own rows; see `Model.for_sampling` for `gather`.
    """
    rows = request.keys.shape[0]
    params = model.for_sampling(params, gather=gather)
    model = dataclasses.replace(model, gathered=gather)
    hidden, cache = _prefill(model, params, request, samples, max_new_tokens)
    starts = jnp.repeat(request.lengths, samples)

    def record(state: _State, hidden: jax.Array) -> _State:
        """Draw the next token of every row from the hidden states that predict it."""
        past = state.response
        logits = model.logits(params, hidden)
        logits = constrain(model.mesh, logits, ("batch", "tokens"))  # filters look at whole rows
        keys = jax.vmap(jax.random.fold_in, (0, None))(request.keys, past.steps)
        tokens, logprobs = draw(keys, logits, request.knobs)
        going = _going(request, past)
        ends = jnp.any(tokens[:, None] == request.stop_ids[None], axis=-1)
        response = Response(
            ids=jax.lax.dynamic_update_slice(past.ids, tokens[:, None], (0, past.steps)),
            logprobs=jax.lax.dynamic_update_slice(
                past.logprobs, logprobs[:, None], (0, past.steps)
            ),
            lengths=past.lengths + going,
            stopped=past.stopped | (going & ends),
            steps=past.steps + 1,
        )
        return _State(response, tokens, state.cache)

    def unfinished(state: _State) -> jax.Array:
        going = jnp.any(_going(request, state.response))
        return going & (state.response.steps < max_new_tokens)

    def advance(state: _State) -> _State:
        positions = (starts + state.response.steps - 1)[:, None]
        hidden, cache = model.extend(params, state.tokens[:, None], positions, state.cache)
        return record(state._replace(cache=cache), hidden[:, 0])

    empty = Response(
        ids=jnp.zeros((rows, max_new_tokens), jnp.int32),
        logprobs=jnp.zeros((rows, max_new_tokens), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
        stopped=jnp.zeros(rows, bool),
        steps=jnp.int32(0),
    )
    first = record(_State(empty, jnp.zeros(rows, jnp.int32), cache), hidden)
    return jax.lax.while_loop(unfinished, advance, first).response


def _going(request: Request, past: Response) -> jax.Array:
    """Rows that get another token."""
    return ~past.stopped & (past.steps < request.limits)


def _prefill(
    model: Model, params: Any, request: Request, samples: int, max_new_tokens: int
) -> tuple[jax.Array, Cache]:
    """Hidden state of each row's last prompt token, and the cache with room for the response.

    A prompt is computed once and its cache repeated for its samples.
    """
    prompts, columns = request.tokens.shape
    request = request._replace(tokens=constrain(model.mesh, request.tokens, ("batch", "time")))
    padding = columns - request.lengths
    positions = jnp.maximum(jnp.arange(columns)[None] - padding[:, None], -1)
    hidden, cache = model.extend(
        params, request.tokens, positions, model.init_cache(prompts, columns)
    )
    # The last token drawn is never fed back, so it needs no column.
    room = max_new_tokens - 1
    return jnp.repeat(hidden[:, -1], samples, axis=0), _spread(cache, samples, room)


def _spread(cache: Cache, samples: int, room: int) -> Cache:
    """The cache with `samples` rows for each of its rows, and `room` more columns, empty."""

    def spread(array: jax.Array, rows: int, columns: int, fill: int) -> jax.Array:
        array = jnp.repeat(array, samples, axis=rows) if samples > 1 else array
        widths = [(0, room if axis == columns else 0) for axis in range(array.ndim)]
        return jnp.pad(array, widths, constant_values=fill)

    return dataclasses.replace(
        cache,
        k=[spread(array, 0, 2, 0) for array in cache.k],
        v=[spread(array, 0, 2, 0) for array in cache.v],
        positions=spread(cache.positions, 0, 1, -1),
    )
