"""Decoding in stages: room that grows as responses do, and a batch that shrinks as rows end.

A step of decoding reads the whole cache and computes every row of it, ended or not, used or not. So
a batch begins with room for few tokens, and where all but a quarter of its rows have ended, the
rest goes on alone. Each size is a program, compiled when it is first needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl.models import Model
from jaxrl.rollout.sampler import (
    Prompts,
    Request,
    Response,
    State,
    begin,
    draw_on,
    prefill,
    regroup,
)
from jaxrl.sharding import place, replicated, row_multiple

__all__ = ["Stages"]

FIRST_ROOM = 128
"""Tokens that a batch has room for at first."""
GROWTH = 4
"""Then so many times as many, and so on, up to what was asked for."""
SHRINK = 4
"""Rows go on in a batch so many times smaller once they fit into it."""
SMALLEST = 16
"""Rows of a batch that is ever shrunk,"""
WORTH = 32
"""where so many steps may be left to take: a step of another size costs its compilation first."""


class Stages:
    """The sampler's programs, and the way through them."""

    def __init__(self, model: Model, *, gather: bool) -> None:
        """Make none yet; `gather` as in `Model.for_sampling`."""
        self._model, self._gather = model, gather
        self._drawing = dataclasses.replace(model, gathered=gather)
        self._divided = model.mesh is not None and row_multiple(model.mesh) > 1
        self.programs: dict[Hashable, jax.stages.Compiled] = {}

    def weights(self, params: Any) -> Any:
        """What `sample` draws with, from the policy's parameters."""
        return self._model.for_sampling(params, gather=self._gather)

    def sample(
        self,
        params: Any,
        weights: Any,
        prompts: Prompts,
        request: Request,
        *,
        samples: int,
        max_new_tokens: int,
    ) -> tuple[Response, int]:
        """The response of every row, on the host, and how many tokens were drawn for it.

        On a mesh that divides the rows a batch keeps them all: others' are not at hand.
        """
        model, mesh = self._drawing, self._model.mesh
        if mesh is not None:
            prompts, request = place((prompts, request), replicated(mesh))
        room = min(FIRST_ROOM, max_new_tokens)
        prefilled = self._run(partial(prefill, self._model), params, prompts)
        start = partial(begin, model, samples=samples, room=room)
        state = self._run(start, weights, prefilled, request, samples=samples, room=room)
        del prefilled
        count = len(request.keys)
        shrinks = count >= SMALLEST and not self._divided
        found, where = _nothing(count, max_new_tokens), np.arange(count)
        steps, drawn = 1, count
        while True:
            few = count // SHRINK if shrinks else 0
            given = (weights, state, request, self._everywhere(np.int32(few)))
            state = self._run(partial(draw_on, model), *given, donated=(1,))
            now, limits = jax.device_get((state.response, state.limits))
            drawn += count * (int(now.steps) - steps)
            steps = int(now.steps)
            found = _put(found, where, now)
            limits = np.minimum(limits, max_new_tokens)
            going = ~now.stopped & (steps < limits)
            if not going.any():
                return found, drawn
            if going.sum() <= few:
                shrinks = limits[going].max() - steps >= WORTH
                count = few if shrinks else count
            room = min(room * GROWTH, max_new_tokens) if steps == room else room
            if (count, room) != now.ids.shape:
                left = np.argsort(~going, stable=True)[:count]
                widen = partial(regroup, room=room)
                rows = self._everywhere(left.astype(np.int32))
                state, where = self._run(widen, state, rows, room=room), where[left]

    def _everywhere(self, array: Any) -> jax.Array:
        """On every device."""
        mesh = self._model.mesh
        return jax.device_put(array) if mesh is None else place(array, replicated(mesh))

    def _run(
        self, function: Any, *given: Any, donated: tuple[int, ...] = (), **static: Hashable
    ) -> Any:
        """Call the function's program for such arguments, compiled ahead of time to be counted."""
        leaves, tree = jax.tree.flatten(given)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        key = (function.func, tree, shapes, *static.items())
        if key not in self.programs:
            places = self._places(function)
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=places)
            self.programs[key] = jitted.lower(*given).compile()
        return self.programs[key](*given)

    def _places(self, function: Any) -> Any:
        """Every process reads all completions, so all of them go to each."""
        mesh = self._model.mesh
        if mesh is None or function.func not in (begin, draw_on, regroup):
            return None
        whole = replicated(mesh)
        return State(whole, whole, whole, whole, whole, None)  # type: ignore[arg-type]


def _nothing(count: int, room: int) -> Any:
    zeros: Any = np.zeros
    ids, logprobs = (zeros((count, room), kind) for kind in (np.int32, np.float32))
    return Response(ids, logprobs, zeros(count, np.int32), zeros(count, bool), zeros(()))


def _put(found: Response, where: Any, now: Response) -> Response:
    """With what these rows have come to."""
    room = now.ids.shape[1]
    for name in ("ids", "logprobs"):
        getattr(found, name)[where, :room] = getattr(now, name)
    found.lengths[where], found.stopped[where] = now.lengths, now.stopped
    return found._replace(steps=now.steps)
