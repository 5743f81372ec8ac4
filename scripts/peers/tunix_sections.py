"""Tunix: log-probabilities, its trainer's policy and critic steps, its sampler, its GAE."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_command
from bench_inputs import (
    Sizes,
    drawn,
    gae_inputs,
    model_config,
    sampled_prompts,
    tensor_shapes,
    token_rows,
)
from bench_inputs import tensors as drawn_tensors
from bench_timing import Work
from flax import nnx
from safetensors.numpy import save_file
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import algo_core, common, rl_cluster, trainer
from tunix.rl import utils as rl_utils
from tunix.rl.ppo import ppo_learner

# None of the inputs holds an id below 3.
SPECIAL = {"pad_id": 0, "eos_id": 2}
BOS = 1


def model_of(sizes: Sizes) -> Any:
    """The drawn weights, by Tunix's own loader."""
    config = qwen3.ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocab,
        embed_dim=sizes.hidden,
        hidden_dim=sizes.inner,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_file(drawn_tensors(tensor_shapes(sizes)), Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text(json.dumps(model_config(sizes)))
        model = qwen3_params.create_model_from_safe_tensors(folder, config)
        jax.block_until_ready(nnx.state(model))
    return model


def logprobs_program(sizes: Sizes, model: Any) -> tuple[Any, tuple[Any, ...]]:
    """Tunix's log-probabilities at the response tokens, compiled, and what they are called with."""
    ids = jnp.asarray(token_rows(sizes))
    arguments = (*nnx.split(model), ids[:, : sizes.prompt], ids[:, sizes.prompt :])
    program = common.compute_per_token_logps.lower(*arguments, **SPECIAL).compile()
    return program, arguments


def logprobs(sizes: Sizes) -> Work:
    """The whole model; the head at every position."""
    program, arguments = logprobs_program(sizes, model_of(sizes))
    return Work(
        lambda: program(*arguments),
        peer_command.temporaries(program),
        lambda out: {"mean": float(out.mean())},
        token_rows(sizes).size,
    )


def example_of(sizes: Sizes, old: jax.Array) -> Any:
    """The batch, as Tunix's learner makes it."""
    ids, draws = jnp.asarray(token_rows(sizes)), drawn(sizes)
    prompt, response = ids[:, : sizes.prompt], ids[:, sizes.prompt :]
    return ppo_learner.TrainExample(
        prompt_ids=prompt,
        prompt_mask=jnp.ones_like(prompt),
        completion_ids=response,
        completion_mask=jnp.ones_like(response),
        advantages=jnp.asarray(draws.advantages),
        returns=jnp.asarray(draws.returns),
        old_values=jnp.asarray(draws.values),
        old_per_token_logps=old + 0.1 * draws.noise,
        ref_per_token_logps=None,
    )


def of_trainer(sizes: Sizes, model: Any, example: Any, loss_of: Any, extra: dict[str, Any]) -> Work:
    """One step of Tunix's trainer: loss, gradient, its norm, AdamW."""
    optimizer = optax.adamw(1e-6)
    settings = rl_cluster.RLTrainingConfig(
        actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=10**9
    )
    tunix = trainer.Trainer(
        model=model,
        optimizer=optimizer,
        training_config=settings,
        custom_checkpoint_metadata_fn=dict,
    )
    tunix.with_loss_fn(loss_of, has_aux=True)
    tunix.with_gen_model_input_fn(lambda x: {"train_example": x, **extra})
    step, _ = tunix.jit_train_and_eval_step()
    planned = step.func.lower(*step.args, example).compile()

    def call() -> Any:
        loss, _, norm = step(example)
        return loss, norm, nnx.state(tunix.model)

    loss, norm, _ = jax.block_until_ready(call())  # the second call compiles once more
    return Work(
        call,
        peer_command.temporaries(getattr(planned, "compiled", planned)),
        lambda _: {"loss": float(loss), "gradient_norm": float(norm)},
        token_rows(sizes).size,
    )


def policy_step(sizes: Sizes) -> Work:
    """Against old log-probabilities moved off the model's own."""
    model = model_of(sizes)
    program, arguments = logprobs_program(sizes, model)
    example = example_of(sizes, jax.block_until_ready(program(*arguments)))

    # nnx.value_and_grad wants named arguments, which a partial hides.
    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.ppo_policy_loss_fn(model, train_example, algo_config, **SPECIAL)

    return of_trainer(sizes, model, example, loss, {"algo_config": ppo_learner.PPOConfig()})


def critic_step(sizes: Sizes) -> Work:
    """A critic with a trunk of its own; its one output starts at zero, as ours."""
    model = rl_utils.create_critic_model(model_of(sizes))
    model.lm_head.kernel[...] = jnp.zeros_like(model.lm_head.kernel[...])
    example = example_of(sizes, jnp.zeros((sizes.rows, sizes.response)))
    extra = {"clip_range_value": ppo_learner.PPOConfig().clip_range_value, **SPECIAL}
    return of_trainer(sizes, model, example, algo_core.ppo_value_loss_fn, extra)


class IdTokenizer:
    """Text is ids with spaces between; the sampler itself puts the first one in front."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        """Text of ids."""
        return " ".join(map(str, ids))

    bos_id = staticmethod(lambda: BOS)
    eos_id = staticmethod(lambda: SPECIAL["eos_id"])
    pad_id = staticmethod(lambda: SPECIAL["pad_id"])


def sampler(sizes: Sizes) -> Work:
    """From text to tokens and their log-probabilities; no stop token, so all rows run on."""
    cache = tunix_sampler.CacheConfig(
        cache_size=sizes.sampled_prompt + sizes.sampled_new,
        num_layers=sizes.layers,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )
    tunix = tunix_sampler.Sampler(model_of(sizes), IdTokenizer(), cache)
    # Its own first token stands in the place of the drawn one.
    prompts = [" ".join(map(str, row[1:])) for row in sampled_prompts(sizes)]

    def call() -> Any:
        return tunix(
            prompts,
            max_generation_steps=sizes.sampled_new,
            max_prompt_length=sizes.sampled_prompt,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[sizes.vocab],  # never drawn
            seed=0,
            return_logprobs=True,
        ).tokens

    return Work(
        call,
        0,
        lambda out: {"new_tokens": float(sum(len(row) for row in out))},
        sizes.sampled_rows * sizes.sampled_new,
    )


def gae(sizes: Sizes, *, large: bool) -> Work:
    """GAE and its whitening."""
    inputs = gae_inputs(sizes.gae_large if large else sizes.gae_small)
    rewards, values, mask = (jnp.asarray(x, y) for x, y in zip(inputs, "ffi", strict=True))
    program = algo_core.compute_gae_advantages.lower(rewards, values, mask, 0.99, 0.95).compile()
    return Work(
        lambda: program(rewards, values, mask, 0.99, 0.95),
        peer_command.temporaries(program),
        lambda out: {
            "returns_sum": float((np.asarray(out[1], np.float64) * inputs[2]).sum()),
            "first_advantage": float(out[0][0, 0]),
        },
        mask.size,
    )


if __name__ == "__main__":
    peer_command.main(
        {
            "logprobs_forward": logprobs,
            "policy_step": policy_step,
            "critic_step": critic_step,
            "sampler": sampler,
            "gae_small": partial(gae, large=False),
            "gae_large": partial(gae, large=True),
        },
        ("google-tunix", "jax", "jaxlib", "flax", "optax", "numpy"),
        jax.block_until_ready,
    )
