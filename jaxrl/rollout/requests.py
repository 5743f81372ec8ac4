"""A batch of prompts as the sampler takes it, laid out on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.sampling import Knobs
from jaxrl.planning import first_fit_decreasing
from jaxrl.rollout.batches import Batch
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.sampler import Prompts, Request
from jaxrl.types import Prompt, Sampling

__all__ = ["lay_out_prompts", "make_request", "stop_array"]


def make_request(
    batch: Batch,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    pad: int,
    pack: bool,
) -> tuple[Prompts, Request]:
    """Lay out a batch; what it lacks is filled with dummy rows that repeat the first prompt."""
    units = [batch.units[i if i < len(batch.units) else 0] for i in range(batch.prompts)]
    rows = np.zeros((batch.prompts, batch.samples), np.int64)
    numbers, epochs = np.zeros_like(rows), np.zeros_like(rows)
    most = np.zeros((batch.prompts, batch.samples), np.int32)
    for i, unit in enumerate(units):
        prompt = prompts[unit.prompt]
        rows[i], epochs[i] = prompt.row, prompt.epoch
        numbers[i] = prompt.first_sample + unit.first + np.arange(batch.samples)
        most[i, : unit.count] = limits[unit.prompt] if i < len(batch.units) else 0
    ids = [prompts[unit.prompt].ids for unit in batch.units]
    laid_out = lay_out_prompts(ids, batch.prompts, batch.columns, pad=pad, pack=pack)
    return laid_out, Request(
        keys=request_keys(seed, rows.ravel(), numbers.ravel(), epochs.ravel()),
        limits=jnp.asarray(most.ravel()),
        stop_ids=stop_array(sampling.stop_token_ids),
        knobs=Knobs.of(sampling),
    )


def lay_out_prompts(
    ids: Sequence[Sequence[int]], count: int, columns: int, *, pad: int, pack: bool
) -> Prompts:
    """Put prompts into rows of `columns` tokens, several to a row where that saves enough rows.

    Args:
        ids: token ids of each, at most `columns`.
        count: prompts that the batch is to have; those beyond `ids` are the first one again, which
            in packed rows costs nothing.
        columns: what a row holds.
        pad: what fills it up.
        pack: whether prompts may share a row.

    Rows are one of few numbers, two an octave, so that few programs are compiled.
    """
    bins = first_fit_decreasing([len(prompt) for prompt in ids], columns)
    rows = next(n for n in _counts() if n >= len(bins))
    if pack and rows < count:
        places = {i: row * columns + at for row, held in enumerate(bins) for i, at in held}
    else:
        rows, shown = count, [*ids, *[ids[0]] * (count - len(ids))]
        ids, places = shown, {i: (i + 1) * columns - len(own) for i, own in enumerate(shown)}
    tokens, segments = np.full(rows * columns, pad, np.int32), np.zeros(rows * columns, np.int32)
    lasts, lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for i in range(count):
        own = i if i < len(ids) else 0
        there = slice(places[own], places[own] + len(ids[own]))
        lasts[i], lengths[i] = there.stop - 1, len(ids[own])
        if own == i:
            tokens[there], segments[there] = ids[own], i + 1
    return Prompts(
        tokens=jnp.asarray(tokens.reshape(rows, columns)),
        segments=jnp.asarray(segments.reshape(rows, columns)),
        lasts=jnp.asarray(lasts),
        lengths=jnp.asarray(lengths),
    )


def stop_array(stop_token_ids: Sequence[int]) -> jax.Array:
    """The stop ids, filled with -1 to a multiple of four: how many there are compiles nothing."""
    size = -(-max(len(stop_token_ids), 1) // 4) * 4
    return jnp.asarray([*stop_token_ids, *[-1] * (size - len(stop_token_ids))], jnp.int32)


def _counts() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ..."""
    yield 1
    size = 2
    while True:
        yield size
        yield size + size // 2
        size *= 2
