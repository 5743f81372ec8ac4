"""What `bench.py` measures: one function a section, each giving a `Work` that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import Sizes, gae_inputs, sampled_prompts
from bench_model import drawn_batch, head_inputs, model_of, packed_rows, weights_of
from bench_timing import Work

from jaxrl.advantages import gae
from jaxrl.config import AlgorithmConfig, CriticConfig, OptimizerConfig
from jaxrl.critic import init_value_params, make_forward
from jaxrl.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.losses import ppo_value_loss
from jaxrl.models.sampling import Knobs
from jaxrl.optim import Optimizer, make_optimizer
from jaxrl.reduce import aggregate, whiten
from jaxrl.rollout.engine import request_keys
from jaxrl.rollout.sampler import Request, sample_batch
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.steps import predicting_hidden, row_inputs
from jaxrl.types import PackedBatch, Prompt, Sampling, TrainBatch, TrainState
from jaxrl.update import make_update_step

# The learning rate and decay of the peers' optimizer, and like theirs no clipping.
ADAMW = OptimizerConfig(lr=1e-6, beta2=0.999, weight_decay=1e-4, max_grad_norm=0.0)


def temporaries(program: jax.stages.Compiled) -> int:
    """Bytes XLA plans for temporaries; 0 where the backend does not say."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


def of_program(
    function: Callable[..., Any], arguments: Sequence[Any], tokens: int,
    check: Callable[[Any], dict[str, float]],
) -> Work:  # fmt: skip
    """A pure function of arrays."""
    program = jax.jit(function).lower(*arguments).compile()
    temp = temporaries(program)
    return Work(lambda: program(*arguments), temp, check, tokens)


def summed(outputs: Any) -> jax.Array:
    """Σ log p, plus .01 Σ H where there is an entropy; over the tokens, to be differentiated."""
    if isinstance(outputs, tuple):
        return (outputs[0].sum() + 0.01 * outputs[1].sum()) / outputs[0].size
    return outputs.sum() / outputs.size


def head_section(sizes: Sizes, *, gradient: bool, entropy: bool) -> Work:
    """The head alone, at every position."""
    hidden, head, targets = head_inputs(sizes)
    score = token_logprobs_and_entropy if entropy else token_logprobs

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return summed(score(hidden, head, targets))

    function = jax.value_and_grad(loss, (0, 1)) if gradient else loss
    return of_program(
        function,
        (hidden, head),
        targets.size,
        lambda out: {"mean": float(out[0] if gradient else out)},
    )


def head_products(sizes: Sizes) -> Work:
    """The one product hidden @ head, in vocabulary blocks: what all of the above is made of.

    A forward pass needs it once; with its gradient there are four products of this size.
    """
    hidden, head, _ = head_inputs(sizes)
    flat, width = hidden.reshape(-1, sizes.hidden), min(1024, sizes.vocab)

    def largest(flat: jax.Array, head: jax.Array) -> jax.Array:
        def block(i: jax.Array) -> jax.Array:
            return (flat @ jax.lax.dynamic_slice_in_dim(head, i * width, width, 1)).max()

        return jax.lax.map(block, jnp.arange(sizes.vocab // width)).max()

    return of_program(largest, (flat, head), len(flat), lambda out: {"largest": float(out)})


def logprobs_section(sizes: Sizes, *, gradient: bool, entropy: bool) -> Work:
    """The whole model; the head at response tokens, as in training."""
    model, packed = model_of(sizes), packed_rows(sizes)
    score = token_logprobs_and_entropy if entropy else token_logprobs

    def loss(params: Any, packed: PackedBatch) -> tuple[jax.Array, Any]:
        hidden = predicting_hidden(model.hidden(params, *row_inputs(packed)), packed)
        outputs = score(hidden, model.head(params), packed.policy_targets, mask=packed.policy_valid)
        return summed(outputs), outputs[0] if entropy else outputs

    function = jax.value_and_grad(loss, has_aux=True) if gradient else loss
    return of_program(
        function,
        (weights_of(model), packed),
        packed.tokens.size,
        lambda out: {"mean": float((out[0][1] if gradient else out[1]).mean())},
    )


def of_step(
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]], state: Any, batch: TrainBatch,
    names: dict[str, str],
) -> Work:  # fmt: skip
    """A step that gives its state away and is called again with the one it returned."""
    program = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    holder = [state]
    del state

    def call() -> Any:
        holder[0], metrics = program(holder[0], batch)
        return metrics, jax.tree.leaves(holder[0])

    return Work(
        call,
        temporaries(program),
        lambda out: {ours: float(out[0][metric]) for ours, metric in names.items()},
        batch.packed.tokens.size,
    )


def policy_step(sizes: Sizes) -> Work:
    """The trainer's update step for a policy without a critic: loss, gradient, AdamW, metrics."""
    model, packed = model_of(sizes), packed_rows(sizes)
    params, forward = weights_of(model), make_forward(model, None)

    @jax.jit
    def scores(params: Any) -> jax.Array:
        hidden = predicting_hidden(model.hidden(params, *row_inputs(packed)), packed)
        return token_logprobs(hidden, model.head(params), packed.policy_targets)

    batch = drawn_batch(sizes, packed, scores(params))
    optimizer = decayed_adamw()
    step = make_update_step(
        forward, AlgorithmConfig(), optimizer, optimizer,
        chunk_size=1024, temperature=1.0, horizon=sizes.response,
    )  # fmt: skip
    zero = {"updates": 0, "iteration": 0, "skipped": 0, "skipped_in_a_row": 0}
    state = TrainState(
        policy_params=params,
        value_params={},
        policy_opt=jax.jit(optimizer.init)(params),
        value_opt=optimizer.init({}),
        kl_coef=jnp.float32(0),
        reward_moments=jnp.zeros(3),
        **{name: jnp.int32(value) for name, value in zero.items()},
    )
    names = {"loss": "policy/loss", "gradient_norm": "policy/grad_norm"}
    return of_step(step, state, batch, names)


def critic_step(sizes: Sizes) -> Work:
    """A critic with a trunk of its own: values, clipped loss, gradient, AdamW."""
    model, packed = model_of(sizes), packed_rows(sizes)
    critic = CriticConfig(kind="model")
    forward, optimizer = make_forward(model, critic), decayed_adamw()
    params = init_value_params(model, critic, weights_of(model))

    def loss(params: Any, batch: TrainBatch) -> jax.Array:
        valid = batch.packed.policy_valid
        values = forward.values(params, None, batch.packed)  # type: ignore[misc, arg-type]
        per_token = ppo_value_loss(values, batch.old_values, batch.returns, mask=valid).per_token
        return aggregate(per_token, valid, mode="token-mean")

    def step(state: Any, batch: TrainBatch) -> tuple[Any, dict[str, jax.Array]]:
        params, opt = state
        total, grads = jax.value_and_grad(loss)(params, jax.tree.map(lambda x: x[0], batch))
        updates, opt = optimizer.update(grads, opt, params)
        return (jax.tree.map(jnp.add, params, updates), opt), {"loss": total}

    batch = drawn_batch(sizes, packed, jnp.zeros(packed.policy_valid.shape))
    return of_step(step, (params, jax.jit(optimizer.init)(params)), batch, {"loss": "loss"})


def decayed_adamw() -> Optimizer:
    """AdamW on every tensor."""
    return make_optimizer(ADAMW, 1000, None)


def sampler(sizes: Sizes) -> Work:
    """The trainside engine from token ids to trajectories; no stop token, so all rows run on."""
    model = model_of(sizes)
    params = weights_of(model)
    rows, length = sizes.sampled_rows, sizes.sampled_prompt
    ids = sampled_prompts(sizes)
    prompts = [Prompt(row=i, ids=tuple(r.tolist()), text="", columns={}) for i, r in enumerate(ids)]
    sampling = Sampling(max_new_tokens=sizes.sampled_new)
    engine = TrainsideEngine(model, params, batch_size=rows)
    request = Request(
        tokens=jnp.asarray(ids),
        lengths=jnp.full(rows, length, jnp.int32),
        keys=request_keys(0, range(rows), [0] * rows),
        live=jnp.ones(rows, bool),
        stop_ids=jnp.full(4, -1, jnp.int32),
        knobs=Knobs.of(sampling),
    )
    program = partial(sample_batch, model, samples=1, max_new_tokens=sizes.sampled_new)
    compiled = jax.jit(program).lower(params, request).compile()
    return Work(
        lambda: engine.generate(prompts, samples=1, sampling=sampling, seed=0),
        temporaries(compiled),
        lambda out: {"new_tokens": float(sum(len(t.response_ids) for t in out))},
        rows * sizes.sampled_new,
    )


def gae_section(sizes: Sizes, *, large: bool) -> Work:
    """GAE and whitening under a mask of unequal row lengths."""
    rewards, values, mask = gae_inputs(sizes.gae_large if large else sizes.gae_small)

    def function(rewards: Any, values: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
        advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=0.95)
        return whiten(advantages, mask), returns

    return of_program(
        function,
        tuple(map(jnp.asarray, (rewards, values, mask))),
        mask.size,
        lambda out: {
            "returns_sum": float(np.asarray(out[1], np.float64).sum()),
            "first_advantage": float(out[0][0, 0]),
        },
    )


SECTIONS: dict[str, Callable[[Sizes], Work]] = {
    "head_products": head_products,
    "head_forward": partial(head_section, gradient=False, entropy=False),
    "head_gradient": partial(head_section, gradient=True, entropy=False),
    "head_entropy_forward": partial(head_section, gradient=False, entropy=True),
    "head_entropy_gradient": partial(head_section, gradient=True, entropy=True),
    "logprobs_forward": partial(logprobs_section, gradient=False, entropy=False),
    "logprobs_gradient": partial(logprobs_section, gradient=True, entropy=False),
    "logprobs_entropy_gradient": partial(logprobs_section, gradient=True, entropy=True),
    "policy_step": policy_step,
    "critic_step": critic_step,
    "sampler": sampler,
    "gae_small": partial(gae_section, large=False),
    "gae_large": partial(gae_section, large=True),
}
