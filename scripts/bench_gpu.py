"""One accelerator: log-prob head, policy step and sampler of a 0.6B-shape Qwen3 in bfloat16.

    scripts/bench_gpu.sh             # at most eight minutes, most of it compiling
    scripts/bench_gpu.sh --small     # tiny sizes, on any machine, to see that it runs

Prints for each: tokens a second, its share of the matrix peak that was measured just before, and
the device's peak memory so far; then whether the first update finds each ratio exactly 1. Weights
are random. FLOPs are those that the model asks for: recomputation is not counted (`jaxrl.flops`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_inputs import SMALL, Sizes, model_config, sampled_prompts
from bench_model import drawn_batch, packed_rows
from bench_sections import policy_state, policy_update

from jaxrl.critic import make_forward
from jaxrl.flops import sequence_flops
from jaxrl.logprobs import PlacedHead, TiedHead, token_logprobs
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.trainside import TrainsideEngine
from jaxrl.steps import policy_outputs
from jaxrl.types import Prompt, Sampling

QWEN3_06B = Sizes(
    layers=28, hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936,
    rows=8, prompt=256, response=1792, sampled_rows=256, sampled_prompt=128, sampled_new=256,
)  # fmt: skip


class Figure(NamedTuple):
    """One piece of work."""

    work: str
    tokens: int
    flops: float
    seconds: float


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Median wall seconds of a call, after one that compiles."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        at = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - at)
    return statistics.median(taken)


def matrix_peak(side: int, repeats: int) -> float:
    """FLOPs a second of one square bfloat16 product."""
    square = jnp.ones((side, side), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * side**3 / timed(lambda: product(square, square), repeats)


def head(model: Model, params: Any, sizes: Sizes, repeats: int) -> Figure:
    """Log-probabilities and both gradients, the embedding read as the head it is tied to."""
    tokens = sizes.rows * sizes.response
    hidden = jax.random.normal(jax.random.key(1), (sizes.rows, sizes.response, sizes.hidden))
    hidden = hidden.astype(model.dtype)
    targets = jax.random.randint(jax.random.key(2), hidden.shape[:2], 0, sizes.vocab)

    @jax.jit
    def gradient(hidden: jax.Array, weight: jax.Array) -> Any:
        def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
            placed = PlacedHead(TiedHead(weight), jnp.dtype(model.dtype), None, None)
            return token_logprobs(hidden, placed, targets).mean()

        return jax.grad(loss, (0, 1))(hidden, weight)

    weight = params["embed"]["weight"]
    flops = 3 * 2.0 * tokens * sizes.hidden * sizes.vocab
    return Figure(
        "log-prob head, forward and gradient", tokens, flops,
        timed(lambda: gradient(hidden, weight), repeats),
    )  # fmt: skip


def sampler(model: Model, params: Any, sizes: Sizes, repeats: int) -> Figure:
    """The trainside engine; no stop token, so all rows run on."""
    rows, new, ids = sizes.sampled_rows, sizes.sampled_new, sampled_prompts(sizes)
    prompts = [
        Prompt(row=i, ids=tuple(map(int, row)), text="", columns={}) for i, row in enumerate(ids)
    ]
    engine = TrainsideEngine(model, params, batch_size=rows)
    seconds = timed(
        lambda: engine.generate(
            prompts, samples=1, sampling=Sampling(max_new_tokens=new), seed=0
        ) and 0,
        repeats,
    )  # fmt: skip
    flops = rows * sequence_flops(model.config, sizes.sampled_prompt + new, new)
    return Figure("sampler, prefill included", rows * new, flops, seconds)


def policy(
    model: Model, params: Any, sizes: Sizes, repeats: int
) -> tuple[Figure, dict[str, float]]:
    """The update step, and what the first one says when nothing has moved yet."""
    packed, forward = packed_rows(sizes), make_forward(model, None, branches=False)
    options: dict[str, Any] = {"chunk_size": 1024, "temperature": 1.0}
    score = jax.jit(lambda params: policy_outputs(forward, params, {}, packed, **options)[0])
    old = score(params)
    # The noise of `drawn_batch` goes: these are the very log-probabilities of the old policy.
    batch = replace(drawn_batch(sizes, packed, old), old_logprobs=old[None])
    step = jax.jit(policy_update(forward, sizes), donate_argnums=0)
    holder = [policy_state(params)]

    def call() -> Any:
        holder[0], metrics = step(holder[0], batch)
        return metrics

    first = {name: float(value) for name, value in jax.device_get(call()).items()}
    length = sizes.prompt + sizes.response
    flops = 3 * sizes.rows * sequence_flops(model.config, length, sizes.response)
    return Figure("policy step", sizes.rows * length, flops, timed(call, repeats)), first


def lines(figures: list[Figure], peak: float) -> Iterator[str]:
    """Markdown."""
    yield "| work | tokens/s | TFLOP/s | of the matrix peak |"
    yield "|---|---|---|---|"
    for work, tokens, flops, seconds in figures:
        rate = flops / seconds
        yield f"| {work} | {tokens / seconds:,.0f} | {rate / 1e12:.4g} | {rate / peak:.1%} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls; the median counts")
    options = parser.parse_args(arguments)
    sizes, repeats = SMALL if options.small else QWEN3_06B, options.repeats
    config = ModelConfig.from_hf(model_config(sizes) | {"tie_word_embeddings": True})
    model = Model(config, dtype="bfloat16", remat="attention")
    params = jax.jit(model.init)(jax.random.key(0))
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {config.num_hidden_layers} layers")
    peak = matrix_peak(256 if options.small else 8192, repeats)
    print(f"matrix peak, bfloat16, measured: {peak / 1e12:.4g} TFLOP/s")
    figures = [head(model, params, sizes, repeats), sampler(model, params, sizes, repeats)]
    figure, first = policy(model, params, sizes, repeats)  # gives the parameters away
    print("\n".join(lines([*figures, figure], peak)))
    memory = device.memory_stats() or {}
    print(f"peak memory: {memory.get('peak_bytes_in_use', np.nan) / 2**30:.2f} GiB")
    low, high = first["policy/ratio_min"], first["policy/ratio_max"]
    norm = first["policy/grad_norm"]
    print(f"first update: ratios from {low!r} to {high!r}, gradient norm {norm!r}")
    if (low, high) != (1.0, 1.0):
        raise SystemExit("the first update's ratios are not exactly 1")


if __name__ == "__main__":
    main()
