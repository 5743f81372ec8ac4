"""Which samples are computed together."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from jaxrl.packing import plan
from peers.recipe import Outputs, recipe


@recipe("unirl(own).TokenBudgetPlanner.arrange")
def _(x: Any, p: dict) -> Outputs:
    """A micro-batch of theirs, whose lengths add up, is one of our rows."""
    budget = p["token_budget"]
    layout = plan(
        x.prompt_lengths.tolist(),
        x.response_lengths.tolist(),
        x.response_lengths.tolist(),
        updates=p["num_updates"],
        micro_batch_tokens=budget,
        row_lengths=[budget],
    )
    slots = sorted(layout.slots, key=lambda s: (s.update, s.micro, s.prompt_offset))
    order = [s.trajectory for s in slots]
    bounds, end = [], 0
    for _update, in_update in groupby(slots, key=lambda s: s.update):
        micros = []
        for _micro, in_micro in groupby(in_update, key=lambda s: s.micro):
            start, end = end, end + len(list(in_micro))
            micros.append([start, end])
        bounds.append(micros)
    return {"perm": order, "plan": bounds}
