"""What `bench.py` measures: one function a section, each giving a `Work` that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import bench_products
import bench_sampling
import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import Sizes, gae_inputs
from bench_model import drawn_batch, head_inputs, model_of, packed_rows, weights_of
from bench_timing import Work

from jaxrl.advantages import gae
from jaxrl.config import AlgorithmConfig, CriticConfig, OptimizerConfig
from jaxrl.critic import init_value_params, make_forward
from jaxrl.logprobs import token_logprobs, token_logprobs_and_entropy
from jaxrl.losses import ppo_value_loss
from jaxrl.optim import Optimizer, make_optimizer
from jaxrl.reduce import aggregate, whiten
from jaxrl.steps import Forward, predicting_hidden, row_inputs
from jaxrl.types import PackedBatch, TrainBatch, TrainState
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
    names = {"loss": "policy/loss", "gradient_norm": "policy/grad_norm"}
    return of_step(policy_update(forward, sizes), policy_state(params), batch, names)


def policy_update(forward: Forward, sizes: Sizes) -> Callable[[Any, Any], Any]:
    """The trainer's update step, for a policy without a critic."""
    optimizer = decayed_adamw()
    return make_update_step(
        forward, AlgorithmConfig(), optimizer, optimizer,
        chunk_size=1024, temperature=1.0, horizon=sizes.response,
    )  # fmt: skip


def policy_state(params: Any) -> TrainState:
    """Before the first update."""
    optimizer = decayed_adamw()
    zero = {"updates": 0, "iteration": 0, "skipped": 0, "skipped_in_a_row": 0}
    return TrainState(
        policy_params=params,
        value_params={},
        policy_opt=jax.jit(optimizer.init)(params),
        value_opt=optimizer.init({}),
        kl_coef=jnp.float32(0),
        reward_moments=jnp.zeros(3),
        **{name: jnp.int32(value) for name, value in zero.items()},
    )


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


def large_head(sizes: Sizes) -> Sizes:
    """A head as large as those of today's models; of small sizes, the same."""
    if sizes.rows < Sizes().rows:
        return sizes
    return replace(sizes, prompt=256, response=768, hidden=1024, vocab=151936)


SECTIONS: dict[str, Callable[[Sizes], Work]] = {
    "head_products": bench_products.head,
    "head_forward": partial(head_section, gradient=False, entropy=False),
    "head_gradient": partial(head_section, gradient=True, entropy=False),
    "head_entropy_forward": partial(head_section, gradient=False, entropy=True),
    "head_entropy_gradient": partial(head_section, gradient=True, entropy=True),
    "logprobs_forward": partial(logprobs_section, gradient=False, entropy=False),
    "logprobs_gradient": partial(logprobs_section, gradient=True, entropy=False),
    "logprobs_entropy_gradient": partial(logprobs_section, gradient=True, entropy=True),
    "head_large_products": lambda sizes: bench_products.head(large_head(sizes)),
    "head_large_gradient": lambda sizes: head_section(
        large_head(sizes), gradient=True, entropy=False
    ),
    "policy_step": policy_step,
    "policy_step_products": bench_products.policy_step,
    "critic_step": critic_step,
    "critic_step_products": bench_products.critic_step,
    "sampler": bench_sampling.sampler,
    "sampler_products": bench_products.sampler,
    "sampler_smollm2": lambda sizes: bench_sampling.sampler_smollm2(
        bench_sampling.smollm2_sizes(sizes.rows < Sizes().rows)
    ),
    "sampler_smollm2_products": lambda sizes: bench_products.sampler(
        bench_sampling.smollm2_sizes(sizes.rows < Sizes().rows)
    ),
    "iteration_smollm2": partial(bench_sampling.iteration, critic="model"),
    "iteration_smollm2_head": partial(bench_sampling.iteration, critic="head"),
    "gae_small": partial(gae_section, large=False),
    "gae_large": partial(gae_section, large=True),
}
