"""The trainer's own sampler: completions from the policy's weights, on the trainer's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import RolloutError
from jaxrl.models import Model
from jaxrl.rollout.batches import Batch, plan_batches
from jaxrl.rollout.engine import OnDone, check_request
from jaxrl.rollout.host_memory import give_back
from jaxrl.rollout.requests import make_request
from jaxrl.rollout.sampler import Response
from jaxrl.rollout.stages import Stages
from jaxrl.sharding import row_multiple
from jaxrl.types import Prompt, Sampling, Trajectory

__all__ = ["RolloutStats", "TrainsideEngine"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """What one `generate` computed, to be set against the tokens it returned."""

    batches: int = 0
    steps: int = 0
    """Decoding steps, all batches together; ends early where all rows of a batch have stopped."""
    prompt_tokens: int = 0
    """Tokens prefilled, padding not counted: each prompt once, not once a sample."""
    response_tokens: int = 0
    """Tokens returned."""
    computed_tokens: int = 0
    """Tokens prefilled or drawn, padding, dummy rows and finished rows included."""


class TrainsideEngine:
    """A `RolloutEngine` in this process. Weights are used as published: no second float32 copy.

    A completion follows from weights, prompt ids, sampling settings, and (seed, prompt row, epoch,
    sample): not from what else is in the request, the batch size, or the process.
    """

    def __init__(
        self,
        model: Model,
        params: Any = None,
        *,
        batch_size: int,
        gather_weights: bool = True,
        pad_token_id: int = 0,
    ) -> None:
        """Make an engine.

        Args:
            model: the decoder; its mesh is where completions are sampled.
            params: weights of version 0; None: `publish` comes first.
            batch_size: most completions decoded at once.
            gather_weights: fetch what a mesh splits over fsdp once a batch, not in every step.
            pad_token_id: fills the left of short prompts; may be an id that prompts contain.
        """
        vocab = model.config.vocab_size
        if batch_size < 1:
            raise RolloutError(f"rollout.batch_size={batch_size!r} must be at least 1")
        if not 0 <= pad_token_id < vocab:
            raise RolloutError(
                f"pad_token_id={pad_token_id} is outside the vocabulary of {vocab}; give an id in"
                f" [0, {vocab}), any will do"
            )
        self._model = model
        self._batch_size = batch_size
        self._multiple = 1 if model.mesh is None else row_multiple(model.mesh)
        self._pad = pad_token_id
        self._expected = jax.eval_shape(model.init, jax.random.key(0))
        self._weights: tuple[Any, int] | None = None
        self._stages = Stages(model, gather=gather_weights)
        self.stats = RolloutStats()
        """Of the last `generate`."""
        if params is not None:
            self.publish(params, 0)

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one for each shape and set of filters."""
        return len(self._stages.programs)

    @property
    def concurrent(self) -> bool:
        """No: the devices are busy with one request."""
        return False

    def publish(self, policy_params: Any, version: int) -> None:
        """Sample with these weights from now on; held by reference, so do not donate them first.

        Raises:
            RolloutError: a tensor is missing, unknown, or of the wrong shape; all are listed.
        """
        faults = _tree_faults(self._expected, policy_params)
        if faults:
            raise RolloutError(
                f"weights of version {version} do not fit the model: {'; '.join(faults)}; publish"
                " the policy's parameters as the model's `init` lays them out"
            )
        self._weights = (jax.tree.map(jnp.asarray, policy_params), version)

    def close(self) -> None:
        """Let go of weights and programs."""
        self._weights = None
        self._stages.programs.clear()

    def rest(self) -> None:
        """What sampling has freed goes back to the system; the weights are the trainer's."""
        give_back()

    def figures(self) -> dict[str, float]:
        """None."""
        return {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        limits: Sequence[int] | None = None,
        on_done: OnDone | None = None,
    ) -> list[Trajectory]:
        """Finish `samples` completions of each prompt, prompt-major; see `RolloutEngine`.

        A limit of a prompt is an argument: other limits need no other program.
        """
        vocab = self._model.config.vocab_size
        check_request(prompts, samples=samples, sampling=sampling, vocab_size=vocab, limits=limits)
        limits = limits or [sampling.max_new_tokens] * len(prompts)
        params, version = self._current_weights()
        weights = self._stages.weights(params)
        found: list[Trajectory | None] = [None] * (len(prompts) * samples)
        stats = RolloutStats()
        lengths = [len(p.ids) for p in prompts]
        for batch in plan_batches(lengths, samples, self._batch_size, self._multiple):
            packed, request = make_request(
                batch, prompts, limits, sampling, seed=seed, pad=self._pad, pack=self._multiple == 1
            )
            response, drawn = self._stages.sample(
                params,
                weights,
                packed,
                request,
                samples=batch.samples,
                max_new_tokens=sampling.max_new_tokens,
            )
            answers = _read(batch, prompts, response, samples, version)
            for index, trajectory in answers:
                found[index] = trajectory
            if on_done:
                on_done([trajectory for _, trajectory in answers])
            stats = _count(stats, batch, prompts, packed.tokens.size + drawn, response)
        self.stats = stats
        finished = [trajectory for trajectory in found if trajectory is not None]
        assert len(finished) == len(found), "every unit of the plan is read exactly once"
        return finished

    def _current_weights(self) -> tuple[Any, int]:
        if self._weights is None:
            raise RolloutError("no weights have been published; call publish(params, version)")
        params, version = self._weights
        if any(array.is_deleted() for array in jax.tree.leaves(params)):
            raise RolloutError(
                f"the weights of version {version} have been donated to another computation;"
                " publish the new ones before asking for completions"
            )
        return params, version


def _tree_faults(expected: Any, given: Any) -> list[str]:
    """What is wrong with the tree of weights, a phrase for each tensor."""
    want, have = (
        {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, (expected, given))
    )
    faults = [f"{name} is missing" for name in want if name not in have]
    faults += [f"{name} is unknown" for name in have if name not in want]
    return faults + [
        f"{name} has shape {have[name]}, expected {shape}"
        for name, shape in want.items()
        if name in have and have[name] != shape
    ]


def _read(
    batch: Batch,
    prompts: Sequence[Prompt],
    response: Response,
    samples: int,
    version: int,
) -> list[tuple[int, Trajectory]]:
    """The trajectories of a batch, each with its place in the answer."""
    found = []
    for i, unit in enumerate(batch.units):
        prompt = prompts[unit.prompt]
        for j in range(unit.count):
            row, number = i * batch.samples + j, prompt.first_sample + unit.first + j
            length = int(response.lengths[row])
            logprobs = response.logprobs[row, :length]
            if not np.isfinite(logprobs).all():
                raise RolloutError(
                    f"prompt row {prompt.row}, sample {number}: the model's logits are not"
                    f" finite at response token {int(np.argmin(np.isfinite(logprobs)))}; the"
                    f" weights of version {version} are broken, go back to an earlier checkpoint"
                )
            trajectory = Trajectory(
                prompt=prompt,
                sample=number,
                response_ids=tuple(response.ids[row, :length].tolist()),
                logprobs=tuple(logprobs.tolist()),
                finish_reason="stop" if response.stopped[row] else "length",
                weight_version=version,
            )
            found.append((unit.prompt * samples + unit.first + j, trajectory))
    return found


def _count(
    stats: RolloutStats, batch: Batch, prompts: Sequence[Prompt], computed: int, response: Response
) -> RolloutStats:
    lengths = np.asarray(response.lengths).reshape(batch.prompts, batch.samples)
    return RolloutStats(
        batches=stats.batches + 1,
        steps=stats.steps + int(response.steps),
        prompt_tokens=stats.prompt_tokens + sum(len(prompts[u.prompt].ids) for u in batch.units),
        response_tokens=stats.response_tokens
        + sum(int(lengths[i, : unit.count].sum()) for i, unit in enumerate(batch.units)),
        computed_tokens=stats.computed_tokens + computed,
    )
